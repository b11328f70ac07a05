// EMA and drift of a list of tensors in one launch; no torch here, so that nvcc alone compiles it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fastsched::cuda {

constexpr int kThreads = 256;
constexpr int64_t kPiece = 1 << 16;  // elements of one block

struct Piece {
  float* avg;
  const void* param;
  int64_t size;
  int32_t bf16;     // the parameter's dtype, else fp32
  int32_t aligned;  // both pointers allow 4-element vector loads
};

// avg <- avg + weight (param - avg); partial [2, count]: each piece's sum |param - avg|^2 and sum |avg|^2 after it
void ema_and_drift(const Piece* pieces, int64_t count, float weight, double* partial, cudaStream_t stream);

}  // namespace fastsched::cuda
