// add_: a bf16 product into its fp32 sum.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include "../ops.h"

namespace fastsched::cpu {

void add_(Tensor& total, const Tensor& part, bool first) {
  using Vec = at::vec::Vectorized<float>;
  using Low = at::vec::Vectorized<at::BFloat16>;
  float* t = total.mutable_data_ptr<float>();
  const at::BFloat16* p = part.const_data_ptr<at::BFloat16>();
  at::parallel_for(0, total.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += Low::size()) {
      int64_t count = std::min<int64_t>(Low::size(), end - i);
      int64_t low_count = std::min<int64_t>(Vec::size(), count), high_count = count - low_count;
      auto [low, high] = at::vec::convert_to_float<at::BFloat16>(Low::loadu(p + i, count));
      if (!first) {
        low = low + Vec::loadu(t + i, low_count);
        if (high_count) high = high + Vec::loadu(t + i + Vec::size(), high_count);
      }
      low.store(t + i, low_count);
      if (high_count) high.store(t + i + Vec::size(), high_count);
    }
  });
}

}  // namespace fastsched::cpu
