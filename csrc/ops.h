// Every compiled op: tensors in, tensors out. R rows, V vocabulary, one file per op family under cpu/ and cuda/.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace fastsched {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Columns of the table that policy_rows_ reads, one row of fp32 for each token.
enum Column : int64_t {
  kAdvantage,
  kTokenWeight,
  kOldLogp,
  kRefLogp,
  kKlCoef,
  kEntropyCoef,
  kClipLow,
  kClipHigh,
  kDualClip,
  kRolloutWeight,
  kDistill,
  kTemperature,
  kTargetLogit,
  kColumns
};

enum KlKind : int64_t { kNone, kK1, kK2, kK3, kExact };

// Bits of `flags`.
enum Flag : int64_t { kOnPolicy = 1, kCispo = 2, kHasTargetLogit = 4, kBackward = 8 };

constexpr int64_t kStateRows = 8;   // logp, entropy, kl, top, log_sum, mean, gap, ref_top
constexpr int64_t kResultRows = 7;  // loss, logp, entropy, kl, ratio, clipped, |c_logp| + |c_entropy| + |c_kl|

void check_average(at::TensorList avg, at::TensorList params);

namespace cpu {

// -> [kStateRows, R]; temperature [R] or [1]; softcap 0: none
Tensor row_stats(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& temperature,
                 double softcap, const OptionalTensor& target_logit);

// state [kStateRows, R], coefficients [3, R]; logits [R, V] become dloss/dlogits
void row_dlogits_(Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& state,
                  const Tensor& coefficients, const Tensor& temperature, double softcap);

// table [R, kColumns] -> [kResultRows, R]; with kBackward the logits become dloss/dlogits
Tensor policy_rows_(Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& table, int64_t kl,
                    int64_t flags, double softcap);

// -> [2] fp64: sum |param - avg|^2, sum |avg|^2 after the update
Tensor ema_and_drift_(at::TensorList avg, at::TensorList params, double alpha);

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
