// weighted_row_sums: a matrix of 64-bit words times a vector, modulo 2^64, at the speed of memory.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

#include "../ops.h"

namespace fastsched::cpu {

Tensor weighted_row_sums(const Tensor& words, const Tensor& factors) {
  int64_t rows = words.size(0), width = words.size(1);
  Tensor out = at::empty({rows}, words.options());
  auto* w = reinterpret_cast<const uint64_t*>(words.const_data_ptr<int64_t>());
  auto* c = reinterpret_cast<const uint64_t*>(factors.const_data_ptr<int64_t>());
  auto* o = reinterpret_cast<uint64_t*>(out.mutable_data_ptr<int64_t>());
  int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(width, 1));
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const uint64_t* row = w + r * width;
      uint64_t sum = 0;
      for (int64_t k = 0; k < width; ++k) sum += row[k] * c[k];
      o[r] = sum;
    }
  });
  return out;
}

}  // namespace fastsched::cpu
