// squared_norm: one pass without a copy in fp32, in pieces that no thread count changes.
#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "../ops.h"
#include "blocks.h"

namespace fastsched::cpu {
namespace {

double squares_of_piece(const Tensor& values, int64_t begin, int64_t end) {
  double total = 0;
  float buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    int64_t n = std::min(kBlock, end - i);
    const float* block = block_of(values, i, n, buffer);
    Vec sum(0.0f);
    by_vector(n, [&](int64_t k, int64_t count) {
      Vec v = Vec::loadu(block + k, count);
      sum = at::vec::fmadd(v, v, sum);
    });
    total += sum_of(sum);
  }
  return total;
}

}  // namespace

Tensor squared_norm(const Tensor& values) {
  int64_t count = (values.numel() + kPiece - 1) / kPiece;
  std::vector<double> sums(count);
  at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      sums[k] = squares_of_piece(values, k * kPiece, std::min((k + 1) * kPiece, values.numel()));
    }
  });
  return at::scalar_tensor(std::accumulate(sums.begin(), sums.end(), 0.0), at::kDouble);
}

}  // namespace fastsched::cpu
