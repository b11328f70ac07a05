// One row of logits, vectorised: scale, statistics, gradient. All arithmetic is fp32 on a padded copy of the row that stays in L2.
// z = softcap * tanh(x / softcap) / temperature, p = softmax(z), q = softmax(r). Sums are centred on the maximum and carried from
// block to block in fp64.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace fastsched::cpu {

using Vec = at::vec::Vectorized<float>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 2048;
static_assert(kBlock % Vec::size() == 0);

struct Scale {
  float inv_temperature;
  float softcap;  // 0: none

  float operator()(float x) const { return (softcap > 0 ? softcap * std::tanh(x / softcap) : x) * inv_temperature; }
};

struct RowState {
  float top, log_sum, mean, gap, ref_top, ref_log_sum;
};

struct RowCoefficients {
  float logp, entropy, kl;
};

inline int64_t padded(int64_t v) { return (v + Vec::size() - 1) / Vec::size() * Vec::size(); }

inline float safe_top(float top) { return top == -kInfinity ? 0.0f : top; }

// The first `count` lanes of z, -inf in the others.
inline Vec head_of(Vec z, int64_t count) { return count < Vec::size() ? Vec::set(Vec(-kInfinity), z, count) : z; }

inline Vec scaled(Vec x, Scale scale) {
  if (scale.softcap > 0) x = Vec(scale.softcap) * (x / Vec(scale.softcap)).tanh();
  return x * Vec(scale.inv_temperature);
}

// z[0, padded(v)) <- scaled row, -inf in the padding; returns its maximum (NaN if there is one).
template <typename T>
float load_scaled(const T* x, float* z, int64_t v, Scale scale) {
  constexpr int64_t kStep = at::vec::Vectorized<T>::size();
  Vec top(-kInfinity);
  for (int64_t i = 0; i < v; i += kStep) {
    int64_t count = std::min(kStep, v - i);
    auto keep = [&](Vec value, int64_t offset) {
      if (count - offset <= 0) return;
      value = head_of(scaled(value, scale), count - offset);
      value.store(z + i + offset);
      top = at::vec::maximum(top, value);
    };
    if constexpr (std::is_same_v<T, float>) {
      keep(Vec::loadu(x + i, count), 0);
    } else {
      auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(x + i, count));
      keep(low, 0);
      keep(high, Vec::size());
    }
  }
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, top);
}

inline double sum_of(Vec value) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, value);
}

// Statistics of the scaled row z and, unless null, the scaled reference row r, both padded with -inf; e <- exp(z - top).
inline RowState row_state(const float* z, const float* r, float* e_out, int64_t size, float top, float ref_top) {
  top = safe_top(top);
  ref_top = safe_top(ref_top);
  const Vec zero(0.0f), vtop(top), vref_top(ref_top);
  double s = 0, t = 0, u = 0, s_ref = 0;
  for (int64_t block = 0; block < size; block += kBlock) {
    Vec bs(0.0f), bt(0.0f), bu(0.0f), bs_ref(0.0f);
    for (int64_t i = block; i < std::min(block + kBlock, size); i += Vec::size()) {
      Vec d = Vec::loadu(z + i) - vtop;
      Vec e = d.exp_u20();
      e.store(e_out + i);
      Vec live = e > zero;
      bs = bs + e;
      bt = bt + Vec::blendv(zero, e * d, live);
      if (r) {
        Vec d_ref = Vec::loadu(r + i) - vref_top;
        bu = bu + Vec::blendv(zero, e * (d - d_ref), live);
        bs_ref = bs_ref + d_ref.exp_u20();
      }
    }
    s += sum_of(bs);
    t += sum_of(bt);
    u += sum_of(bu);
    s_ref += sum_of(bs_ref);
  }
  bool empty = s == 0;
  return {top, static_cast<float>(std::log(s)), static_cast<float>(empty ? 0 : t / s), static_cast<float>(empty ? 0 : u / s),
          ref_top, static_cast<float>(std::log(s_ref))};
}

inline void row_exp(const float* z, float* e, int64_t size, float top) {
  for (int64_t i = 0; i < size; i += Vec::size()) (Vec::loadu(z + i) - Vec(top)).exp_u20().store(e + i);
}

// z <- dloss/dx: [c_logp (onehot - p) + c_entropy p (E[z] - z) + c_kl p ((z - r) - E[z - r])] / temperature * (1 - tanh^2),
// with p = e / sum e
inline void row_gradient(float* z, const float* r, const float* e, int64_t size, int64_t target, const RowState& state,
                         RowCoefficients c, Scale scale) {
  if (state.log_sum == -kInfinity) {
    std::fill(z, z + size, 0.0f);
    return;
  }
  float inv_sum = std::exp(-state.log_sum), z_target = z[target];
  bool with_kl = r && !std::isinf(state.gap) && c.kl != 0;
  if (!with_kl && c.entropy == 0 && scale.softcap == 0) {
    const Vec factor(-c.logp * inv_sum * scale.inv_temperature);
    for (int64_t i = 0; i < size; i += Vec::size()) (Vec::loadu(e + i) * factor).store(z + i);
    z[target] += c.logp * scale.inv_temperature;
    return;
  }
  const Vec zero(0.0f), one(1.0f), top(state.top), ref_top(state.ref_top), c_entropy(c.entropy), c_kl(c.kl);
  const Vec weight(inv_sum * scale.inv_temperature);
  // c_entropy (mean - d) - c_logp + c_kl (d - d_ref - gap), constants gathered
  const Vec constant(c.entropy * state.mean - c.logp - (with_kl ? c.kl * state.gap : 0.0f));
  const float to_tanh = scale.softcap > 0 ? 1.0f / (scale.softcap * scale.inv_temperature) : 0.0f;
  for (int64_t i = 0; i < size; i += Vec::size()) {
    Vec value = Vec::loadu(z + i), p = Vec::loadu(e + i);
    Vec d = value - top;
    Vec factor = constant - c_entropy * d;
    if (with_kl) factor = factor + c_kl * (d - (Vec::loadu(r + i) - ref_top));
    Vec gradient = Vec::blendv(zero, p * factor, p > zero) * weight;
    if (scale.softcap > 0) {
      Vec tanh = value * Vec(to_tanh);
      gradient = gradient * (one - Vec::blendv(zero, tanh * tanh, p > zero));
    }
    gradient.store(z + i);
  }
  float tanh = scale.softcap > 0 ? z_target * to_tanh : 0.0f;  // the target may be -inf
  z[target] += c.logp * scale.inv_temperature * (1.0f - tanh * tanh);
}

template <typename T>
void store_row(const float* z, T* x, int64_t v) {
  if constexpr (std::is_same_v<T, float>) {
    std::copy(z, z + v, x);
  } else {
    at::vec::convert<float, T>(z, x, v);
  }
}

}  // namespace fastsched::cpu
