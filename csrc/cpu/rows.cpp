// row_stats, row_dlogits_, policy_rows_: rows in parallel, each row by one thread.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "../ops.h"
#include "row.h"

namespace fastsched::cpu {
namespace {

constexpr float kLogLimit = 20.0f;

struct Buffers {
  std::vector<float> z, e, r;
  explicit Buffers(int64_t v, bool ref) : z(padded(v)), e(padded(v)), r(ref ? padded(v) : 0) {}
};

// The target's logits in fp32, which take the place of the rounded ones; null where the logits are as good.
struct Fine {
  const float* policy;
  const float* reference;
  int64_t stride;  // from row to row

  Fine(const OptionalTensor& policy_, const OptionalTensor& reference_)
      : policy(policy_ ? policy_->const_data_ptr<float>() : nullptr),
        reference(reference_ ? reference_->const_data_ptr<float>() : nullptr),
        stride(1) {}
  Fine(const float* numbers, int64_t flags)
      : policy(flags & flag::has_target_logit ? numbers + column::target_logit : nullptr),
        reference(flags & flag::has_ref_target_logit ? numbers + column::ref_target_logit : nullptr),
        stride(column::count) {}
};

template <typename T>
struct Rows {
  const T* logits;
  const T* ref;  // may be null
  int64_t stride, ref_stride, v;

  Rows(const Tensor& logits_, const OptionalTensor& ref_)
      : logits(static_cast<const T*>(logits_.const_data_ptr())),
        ref(ref_ ? static_cast<const T*>(ref_->const_data_ptr()) : nullptr),
        stride(logits_.stride(0)),
        ref_stride(ref_ ? ref_->stride(0) : 0),
        v(logits_.size(1)) {}

  // Fills z and r; returns their maxima, or something above them where the target's rounded logit was the largest.
  std::pair<float, float> fill(int64_t row, int64_t target, Scale scale, const Fine& fine, Buffers& b) const {
    float top = load_scaled(logits + row * stride, b.z.data(), v, scale);
    if (fine.policy) top = replace(b.z[target], scale(fine.policy[row * fine.stride]), top);
    float ref_top = ref ? load_scaled(ref + row * ref_stride, b.r.data(), v, scale) : 0.0f;
    if (ref && fine.reference) ref_top = replace(b.r[target], scale(fine.reference[row * fine.stride]), ref_top);
    return {top, ref_top};
  }

  RowState load(int64_t row, int64_t target, Scale scale, const Fine& fine, Buffers& b) const {
    auto [top, ref_top] = fill(row, target, scale, fine, b);
    return row_state(b.z.data(), r(b), b.e.data(), padded(v), top, ref_top);
  }

  static float replace(float& entry, float fine, float top) {
    entry = fine;
    return std::max(top, fine);  // a NaN maximum stays
  }

  const float* r(const Buffers& b) const { return ref ? b.r.data() : nullptr; }
};

struct Measured {
  float logp, entropy, kl;
};

Measured measure(const RowState& s, float z_target, bool ref) {
  if (s.log_sum == -kInfinity) return {-kInfinity, 0.0f, ref ? 0.0f : NAN};
  float logp = z_target - s.top - s.log_sum;
  return {logp > 0 ? 0.0f : logp, s.log_sum - s.mean, ref ? s.gap - s.log_sum + s.ref_log_sum : NAN};
}

float times(float coefficient, float value) { return coefficient == 0 ? 0.0f : coefficient * value; }

struct Outcome {
  float loss, ratio, kl;
  bool clipped;
  RowCoefficients c;
};

// Loss of one token and its derivatives by logp, entropy and exact KL; the specification is reference.token_loss.
Outcome policy_row(const float* number, const Measured& m, int64_t kl_kind, int64_t flags) {
  float raw = m.logp - (flags & flag::on_policy ? m.logp : number[column::old_logp]);
  float log_ratio = raw > kLogLimit ? kLogLimit : (raw < -kLogLimit ? -kLogLimit : raw);
  float ratio = std::exp(log_ratio);
  float advantage = number[column::advantage] + (number[column::distill] == 0 ? 0.0f : number[column::distill] * (number[column::ref_logp] - m.logp));
  float low = 1 - number[column::clip_low], high = 1 + number[column::clip_high], surrogate, d_surrogate;
  bool clipped;
  if (flags & flag::cispo) {
    clipped = ratio < low || ratio > high;
    float weight = ratio < low ? low : (ratio > high ? high : ratio);
    d_surrogate = weight * advantage;
    surrogate = d_surrogate * m.logp;
  } else {
    bool above = advantage > 0 && ratio > high, below = advantage < 0 && ratio < low;
    float bound = above ? high : (below ? low : ratio);
    bool dual = advantage < 0 && bound > number[column::dual_clip];
    clipped = above || below || dual;
    surrogate = (dual ? number[column::dual_clip] : bound) * advantage;
    d_surrogate = clipped || std::abs(raw) > kLogLimit ? 0.0f : ratio * advantage;
  }
  float kl = NAN, d_kl = 0.0f, d = m.logp - number[column::ref_logp];
  switch (kl_kind) {
    case kl::none:
      break;
    case kl::exact:
      kl = m.kl;
      break;
    case kl::k1:
      kl = d, d_kl = 1.0f;
      break;
    case kl::k2:
      kl = d * d / 2, d_kl = d;
      break;
    default: {
      float limited = d > kLogLimit ? kLogLimit : (d < -kLogLimit ? -kLogLimit : d);
      kl = std::expm1(-limited) + limited;
      d_kl = std::abs(d) > kLogLimit ? 0.0f : -std::expm1(-d);
    }
  }
  float w = number[column::token_weight];
  float loss = -number[column::rollout_weight] * surrogate - times(number[column::entropy_coef], m.entropy);
  if (kl_kind != kl::none) loss += times(number[column::kl_coef], kl);
  RowCoefficients c{w * (-number[column::rollout_weight] * d_surrogate + times(number[column::kl_coef], d_kl)), -w * number[column::entropy_coef],
                    kl_kind == kl::exact ? w * number[column::kl_coef] : 0.0f};
  return {w * loss, ratio, kl, clipped, c};
}

// Where the gradient goes; z becomes it.
struct Gradient {
  const Tensor& out;

  void store(float* z, const float* r, const float* e, int64_t row, int64_t target, const RowState& state, RowCoefficients c,
             Scale scale) const {
    int64_t v = out.size(1);
    row_gradient(z, r, e, padded(v), target, state, c, scale);
    if (out.scalar_type() == at::kFloat) {
      store_row(z, static_cast<float*>(out.data_ptr()) + row * out.stride(0), v);
    } else {
      store_row(z, static_cast<at::BFloat16*>(out.data_ptr()) + row * out.stride(0), v);
    }
  }
};

template <typename F>
void dispatch(const Tensor& logits, F&& f) {
  if (logits.scalar_type() == at::kFloat) {
    f(float{});
  } else {
    f(at::BFloat16{});
  }
}

struct Temperature {
  const float* data;
  bool per_row;
  float softcap;

  Temperature(const Tensor& t, double softcap_)
      : data(t.const_data_ptr<float>()), per_row(t.numel() > 1), softcap(static_cast<float>(softcap_)) {}
  Scale operator[](int64_t row) const { return {1.0f / data[per_row ? row : 0], softcap}; }
};

}  // namespace

Tensor row_stats(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& temperature,
                 double softcap, const OptionalTensor& target_logit, const OptionalTensor& ref_target_logit) {
  int64_t n = logits.size(0);
  Tensor out = at::empty({state::count, n}, logits.options().dtype(at::kFloat));
  float* o = out.mutable_data_ptr<float>();
  const int64_t* y = target.const_data_ptr<int64_t>();
  Fine fine(target_logit, ref_target_logit);
  Temperature temperatures(temperature, softcap);
  dispatch(logits, [&](auto type) {
    Rows<decltype(type)> rows(logits, ref_logits);
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      Buffers b(rows.v, rows.ref);
      for (int64_t i = begin; i < end; ++i) {
        Scale scale = temperatures[i];
        RowState s = rows.load(i, y[i], scale, fine, b);
        Measured m = measure(s, b.z[y[i]], rows.ref);
        auto set = [&](int64_t k, float value) { o[k * n + i] = value; };
        set(state::logp, m.logp);
        set(state::entropy, m.entropy);
        set(state::kl, m.kl);
        set(state::top, s.top);
        set(state::log_sum, s.log_sum);
        set(state::mean, s.mean);
        set(state::gap, rows.ref ? s.gap : NAN);
        set(state::ref_top, rows.ref ? s.ref_top : NAN);
      }
    });
  });
  return out;
}

void row_dlogits_(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& state,
                  const Tensor& coefficients, const Tensor& temperature, double softcap, const OptionalTensor& target_logit,
                  const OptionalTensor& ref_target_logit, Tensor& out) {
  int64_t n = logits.size(0);
  const float* s = state.const_data_ptr<float>();
  const float* c = coefficients.const_data_ptr<float>();
  const int64_t* y = target.const_data_ptr<int64_t>();
  Temperature temperatures(temperature, softcap);
  Fine fine(target_logit, ref_target_logit);
  Gradient gradient{out};
  dispatch(logits, [&](auto type) {
    Rows<decltype(type)> rows(logits, ref_logits);
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      Buffers b(rows.v, rows.ref);
      for (int64_t i = begin; i < end; ++i) {
        Scale scale = temperatures[i];
        rows.fill(i, y[i], scale, fine, b);
        auto of = [&](int64_t k) { return s[k * n + i]; };
        RowState r{of(state::top), of(state::log_sum), of(state::mean), of(state::gap), of(state::ref_top), 0.0f};
        row_exp(b.z.data(), b.e.data(), padded(rows.v), r.top);
        RowCoefficients by{c[coefficient::logp * n + i], c[coefficient::entropy * n + i], c[coefficient::kl * n + i]};
        gradient.store(b.z.data(), rows.r(b), b.e.data(), i, y[i], r, by, scale);
      }
    });
  });
}

Tensor policy_rows_(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& table, int64_t kl_kind,
                    int64_t flags, double softcap, Tensor& out) {
  int64_t n = logits.size(0);
  Tensor results = at::empty({result::count, n}, logits.options().dtype(at::kFloat));
  float* o = results.mutable_data_ptr<float>();
  const float* numbers = table.const_data_ptr<float>();
  const int64_t* y = target.const_data_ptr<int64_t>();
  Fine fine(numbers, flags);
  Gradient gradient{out};
  dispatch(logits, [&](auto type) {
    Rows<decltype(type)> rows(logits, ref_logits);
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      Buffers b(rows.v, rows.ref);
      for (int64_t i = begin; i < end; ++i) {
        const float* row = numbers + i * column::count;
        Scale scale{1.0f / row[column::temperature], static_cast<float>(softcap)};
        RowState s = rows.load(i, y[i], scale, fine, b);
        Measured m = measure(s, b.z[y[i]], rows.ref);
        Outcome r = policy_row(row, m, kl_kind, flags);
        if (flags & flag::backward) gradient.store(b.z.data(), rows.r(b), b.e.data(), i, y[i], s, r.c, scale);
        float size = std::abs(r.c.logp) + std::abs(r.c.entropy) + std::abs(r.c.kl);
        auto set = [&](int64_t k, float value) { o[k * n + i] = value; };
        set(result::loss, r.loss);
        set(result::logp, m.logp);
        set(result::entropy, m.entropy);
        set(result::kl, r.kl);
        set(result::ratio, r.ratio);
        set(result::clipped, r.clipped ? 1.0f : 0.0f);
        set(result::size, size);
      }
    });
  });
  return results;
}

}  // namespace fastsched::cpu
