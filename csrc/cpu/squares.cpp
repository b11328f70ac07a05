// squared_norm: one pass without a copy in fp32, in pieces that no thread count changes.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "../ops.h"

namespace fastsched::cpu {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kPiece = 1 << 15;
constexpr int64_t kBlock = 1024;  // summed in fp32, then carried in fp64

double squares_of_block(const float* values, int64_t n) {
  Vec sum(0.0f);
  int64_t i = 0;
  auto step = [&](int64_t count) {
    Vec v = Vec::loadu(values + i, count);
    sum = at::vec::fmadd(v, v, sum);
  };
  for (; i + Vec::size() <= n; i += Vec::size()) step(Vec::size());
  if (i < n) step(n - i);
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum);
}

double squares_of_piece(const Tensor& values, int64_t begin, int64_t end) {
  double total = 0;
  float buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    int64_t n = std::min(kBlock, end - i);
    const float* v = buffer;
    if (values.scalar_type() == at::kFloat) {
      v = values.const_data_ptr<float>() + i;
    } else {
      at::vec::convert<at::BFloat16, float>(values.const_data_ptr<at::BFloat16>() + i, buffer, n);
    }
    total += squares_of_block(v, n);
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
