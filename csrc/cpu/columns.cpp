// active_columns, gather_columns, add_rows_: the three steps of the column filter around its two smaller GEMMs.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "../ops.h"

namespace fastsched::cpu {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kWidth = 2048;  // columns of one task: its sums stay in L1

template <typename T>
void mark(const Tensor& dlogits, const float* threshold, bool* active, float* sums, int64_t begin, int64_t end) {
  int64_t width = end - begin;
  std::vector<float> excess(width, 0.0f), values(width);
  std::fill(sums + begin, sums + end, 0.0f);
  for (int64_t row = 0; row < dlogits.size(0); ++row) {
    at::vec::convert<T, float>(static_cast<const T*>(dlogits.const_data_ptr()) + row * dlogits.stride(0) + begin, values.data(), width);
    const Vec limit(threshold[row]);
    for (int64_t i = 0; i < width; i += Vec::size()) {
      int64_t n = std::min<int64_t>(Vec::size(), width - i);
      Vec size = Vec::loadu(values.data() + i, n).abs();
      at::vec::maximum(Vec::loadu(excess.data() + i, n), size - limit).store(excess.data() + i, n);
      (Vec::loadu(sums + begin + i, n) + size).store(sums + begin + i, n);
    }
  }
  for (int64_t i = 0; i < width; ++i) active[begin + i] = !(excess[i] <= 0.0f);
}

template <typename F>
void dispatch(const Tensor& tensor, F&& f) {
  if (tensor.scalar_type() == at::kFloat) {
    f(float{});
  } else {
    f(at::BFloat16{});
  }
}

}  // namespace

std::tuple<Tensor, Tensor> active_columns(const Tensor& dlogits, const Tensor& threshold) {
  int64_t v = dlogits.size(1);
  Tensor active = at::empty({v}, dlogits.options().dtype(at::kBool)), sums = at::empty({v}, dlogits.options().dtype(at::kFloat));
  bool* a = active.mutable_data_ptr<bool>();
  float* s = sums.mutable_data_ptr<float>();
  dispatch(dlogits, [&](auto type) {
    at::parallel_for(0, (v + kWidth - 1) / kWidth, 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) {
        mark<decltype(type)>(dlogits, threshold.const_data_ptr<float>(), a, s, k * kWidth, std::min((k + 1) * kWidth, v));
      }
    });
  });
  return {active, sums};
}

Tensor gather_columns(const Tensor& dlogits, const Tensor& columns) {
  int64_t n = dlogits.size(0), k = columns.size(0);
  Tensor out = at::empty({n, k}, dlogits.options());
  const int64_t* c = columns.const_data_ptr<int64_t>();
  dispatch(dlogits, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = static_cast<const T*>(dlogits.const_data_ptr()) + row * dlogits.stride(0);
        T* to = static_cast<T*>(out.mutable_data_ptr()) + row * k;
        for (int64_t i = 0; i < k; ++i) to[i] = from[c[i]];
      }
    });
  });
  return out;
}

void add_rows_(Tensor& total, const Tensor& rows, const Tensor& part) {
  int64_t h = total.size(1);
  const int64_t* index = rows.const_data_ptr<int64_t>();
  dispatch(part, [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows.size(0), 16, [&](int64_t begin, int64_t end) {
      std::vector<float> values(h);
      for (int64_t i = begin; i < end; ++i) {
        at::vec::convert<T, float>(part.const_data_ptr<T>() + i * h, values.data(), h);
        float* to = total.mutable_data_ptr<float>() + index[i] * h;
        at::vec::map2<float>([](Vec a, Vec b) { return a + b; }, to, to, values.data(), h);
      }
    });
  });
}

}  // namespace fastsched::cpu
