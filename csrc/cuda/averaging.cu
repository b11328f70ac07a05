// One block for each piece of a tensor: average and parameter are read once, the average is written once. Sums are fp32 within a
// thread's run of elements and fp64 across threads and pieces; no atomics, so the result does not depend on the schedule.
#include "averaging.h"

#include <cuda_bf16.h>

namespace fastsched::cuda {
namespace {

struct Sums {
  float drift = 0, norm = 0;

  __device__ float update(float avg, float param, float weight) {
    avg = fmaf(weight, param - avg, avg);
    drift = fmaf(param - avg, param - avg, drift);
    norm = fmaf(avg, avg, norm);
    return avg;
  }
};

__device__ float4 load4(const float* p, int64_t i) { return reinterpret_cast<const float4*>(p)[i]; }

__device__ float4 load4(const __nv_bfloat16* p, int64_t i) {
  uint2 raw = reinterpret_cast<const uint2*>(p)[i];
  float2 low = __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(raw.x));
  float2 high = __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(raw.y));
  return {low.x, low.y, high.x, high.y};
}

__device__ float load(const float* p, int64_t i) { return p[i]; }

__device__ float load(const __nv_bfloat16* p, int64_t i) { return __bfloat162float(p[i]); }

template <typename T>
__device__ Sums update_piece(float* avg, const T* param, int64_t size, bool aligned, float weight) {
  Sums s;
  int64_t vectors = aligned ? size / 4 : 0;
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) {
    float4 a = load4(avg, i), p = load4(param, i);
    a.x = s.update(a.x, p.x, weight);
    a.y = s.update(a.y, p.y, weight);
    a.z = s.update(a.z, p.z, weight);
    a.w = s.update(a.w, p.w, weight);
    reinterpret_cast<float4*>(avg)[i] = a;
  }
  for (int64_t i = 4 * vectors + threadIdx.x; i < size; i += kThreads) {
    avg[i] = s.update(avg[i], load(param, i), weight);
  }
  return s;
}

__device__ double block_sum(double value, double* shared) {
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_down_sync(0xffffffffu, value, lane);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < kThreads / 32; ++warp) total += shared[warp];
  }
  __syncthreads();
  return total;
}

__global__ void __launch_bounds__(kThreads) ema_and_drift_kernel(const Piece* pieces, int64_t count, float weight, double* partial) {
  __shared__ double shared[kThreads / 32];
  Piece p = pieces[blockIdx.x];
  Sums s = p.bf16 ? update_piece(p.avg, static_cast<const __nv_bfloat16*>(p.param), p.size, p.aligned, weight)
                  : update_piece(p.avg, static_cast<const float*>(p.param), p.size, p.aligned, weight);
  double drift = block_sum(s.drift, shared), norm = block_sum(s.norm, shared);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = drift;
    partial[count + blockIdx.x] = norm;
  }
}

}  // namespace

void ema_and_drift(const Piece* pieces, int64_t count, float weight, double* partial, cudaStream_t stream) {
  if (count > 0) ema_and_drift_kernel<<<static_cast<unsigned>(count), kThreads, 0, stream>>>(pieces, count, weight, partial);
}

}  // namespace fastsched::cuda
