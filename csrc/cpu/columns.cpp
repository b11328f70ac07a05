// active_columns: which vocabulary columns of a chunk's dlogits matter to some row.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "../ops.h"

namespace fastsched::cpu {
namespace {

using Vec = at::vec::Vectorized<float>;

template <typename T>
void mark(const Tensor& dlogits, const float* threshold, bool* active, int64_t begin, int64_t end) {
  int64_t width = end - begin;
  std::vector<float> excess(width, 0.0f), values(width);
  const Vec zero(0.0f);
  for (int64_t row = 0; row < dlogits.size(0); ++row) {
    at::vec::convert<T, float>(static_cast<const T*>(dlogits.const_data_ptr()) + row * dlogits.stride(0) + begin, values.data(), width);
    const Vec limit(threshold[row]);
    for (int64_t i = 0; i < width; i += Vec::size()) {
      int64_t n = std::min<int64_t>(Vec::size(), width - i);
      Vec over = Vec::loadu(values.data() + i, n).abs() - limit;
      at::vec::maximum(Vec::loadu(excess.data() + i, n), over).store(excess.data() + i, n);
    }
  }
  for (int64_t i = 0; i < width; ++i) active[begin + i] = !(excess[i] <= 0.0f);
}

}  // namespace

Tensor active_columns(const Tensor& dlogits, const Tensor& threshold) {
  constexpr int64_t kWidth = 2048;
  int64_t v = dlogits.size(1);
  Tensor out = at::zeros({v}, dlogits.options().dtype(at::kBool));
  bool* active = out.mutable_data_ptr<bool>();
  const float* limits = threshold.const_data_ptr<float>();
  at::parallel_for(0, (v + kWidth - 1) / kWidth, 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      int64_t begin = k * kWidth, end = std::min(begin + kWidth, v);
      if (dlogits.scalar_type() == at::kFloat) {
        mark<float>(dlogits, limits, active, begin, end);
      } else {
        mark<at::BFloat16>(dlogits, limits, active, begin, end);
      }
    }
  });
  return out;
}

}  // namespace fastsched::cpu
