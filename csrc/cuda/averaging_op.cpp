// Registers ema_and_drift_ for CUDA tensors: cuts the list into pieces, one launch, one sum.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "../ops.h"
#include "averaging.h"

namespace fastsched::cuda {
namespace {

bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

std::vector<Piece> cut(at::TensorList avg, at::TensorList params) {
  std::vector<Piece> pieces;
  for (size_t t = 0; t < avg.size(); ++t) {
    bool bf16 = params[t].scalar_type() == at::kBFloat16;
    float* a = avg[t].mutable_data_ptr<float>();
    const char* p = static_cast<const char*>(params[t].const_data_ptr());
    for (int64_t i = 0; i < avg[t].numel(); i += kPiece) {
      const char* at = p + i * (bf16 ? 2 : 4);
      bool fits = aligned(a + i, 16) && aligned(at, bf16 ? 8 : 16);
      pieces.push_back({a + i, at, std::min(kPiece, avg[t].numel() - i), bf16, fits});
    }
  }
  return pieces;
}

Tensor ema_and_drift_op(at::TensorList avg, at::TensorList params, double alpha) {
  check_average(avg, params);
  c10::cuda::CUDAGuard guard(avg[0].device());
  std::vector<Piece> pieces = cut(avg, params);
  auto count = static_cast<int64_t>(pieces.size());
  Tensor table = at::from_blob(pieces.data(), {static_cast<int64_t>(count * sizeof(Piece))}, at::kByte).to(avg[0].device());
  Tensor partial = at::empty({2, count}, avg[0].options().dtype(at::kDouble));
  ema_and_drift(reinterpret_cast<const Piece*>(table.const_data_ptr()), count, static_cast<float>(1.0 - alpha),
                partial.mutable_data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return partial.sum(1);
}

}  // namespace
}  // namespace fastsched::cuda

TORCH_LIBRARY_IMPL(fastsched_kernels, CUDA, m) { m.impl("ema_and_drift_", fastsched::cuda::ema_and_drift_op); }
