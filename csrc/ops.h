// Every compiled op: tensors in, tensors out. R rows, V vocabulary, one file per op family under cpu/ and cuda/.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "table.h"

namespace fastsched {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_average(at::TensorList avg, at::TensorList params);

namespace cpu {

// -> [state::count, R]; temperature [R] or [1]; softcap 0: none; target_logit, ref_target_logit [R]: the target's entry in fp32
Tensor row_stats(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& temperature,
                 double softcap, const OptionalTensor& target_logit, const OptionalTensor& ref_target_logit);

// state [state::count, R], coefficients [coefficient::count, R]; out [R, V], which may be the logits, becomes dloss/dlogits
void row_dlogits_(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& state,
                  const Tensor& coefficients, const Tensor& temperature, double softcap, const OptionalTensor& target_logit,
                  const OptionalTensor& ref_target_logit, Tensor& out);

// table [R, column::count] -> [result::count, R]; kl is a kl::, flags are bits of flag::, with flag::backward `out` becomes dloss/dlogits
Tensor policy_rows_(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& table, int64_t kl,
                    int64_t flags, double softcap, Tensor& out);

// -> [2] fp64: sum |param - avg|^2, sum |avg|^2 after the update
Tensor ema_and_drift_(at::TensorList avg, at::TensorList params, double alpha);

// -> fp64 scalar: sum of the squares of a contiguous fp32 or bf16 tensor
Tensor squared_norm(const Tensor& values);

// words [R, W], factors [W], int64 -> [R]: their products, modulo 2^64
Tensor weighted_row_sums(const Tensor& words, const Tensor& factors);

// total (fp32) += part (bf16), or = part when it is the first
void add_(Tensor& total, const Tensor& part, bool first);

// dlogits [R, V], threshold [R] -> [V] bool: some row exceeds its threshold in this column; [V] fp32: sum |dlogits| of the column
std::tuple<Tensor, Tensor> active_columns(const Tensor& dlogits, const Tensor& threshold);

// dlogits [R, V], columns [K] -> [R, K]
Tensor gather_columns(const Tensor& dlogits, const Tensor& columns);

// total [V, H] fp32: total[rows[i]] += part[i]; the rows are distinct
void add_rows_(Tensor& total, const Tensor& rows, const Tensor& part);

}  // namespace cpu
}  // namespace fastsched
