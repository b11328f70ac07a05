// Reading fp32 or bf16 tensors block by block in fp32, and adding up what the blocks gave.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

namespace fastsched::cpu {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kPiece = 1 << 15;  // of one thread at a time, so that no thread count changes a sum
constexpr int64_t kBlock = 1024;     // summed in fp32, then carried in fp64

inline double sum_of(Vec value) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, value);
}

// step(offset, count) over n elements, a vector at a time, the last one shorter
template <typename Step>
inline void by_vector(int64_t n, Step step) {
  int64_t i = 0;
  for (; i + Vec::size() <= n; i += Vec::size()) step(i, Vec::size());
  if (i < n) step(i, n - i);
}

// Elements [begin, begin + n) of a contiguous tensor, n <= kBlock; bf16 goes through the buffer
inline const float* block_of(const at::Tensor& values, int64_t begin, int64_t n, float* buffer) {
  if (values.scalar_type() == at::kFloat) return values.const_data_ptr<float>() + begin;
  at::vec::convert<at::BFloat16, float>(values.const_data_ptr<at::BFloat16>() + begin, buffer, n);
  return buffer;
}

}  // namespace fastsched::cpu
