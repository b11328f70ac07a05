// The layout of what the row kernels read and write, by the names of fastsched_kernels/table.py. table_layout() lists it: the package
// refuses compiled ops whose list differs from its own.
#pragma once

#include <cstdint>

// Columns of the table that policy_rows_ reads, one row of fp32 for each token.
#define FASTSCHED_COLUMNS(_)                                                                              \
  _(column, advantage) _(column, token_weight) _(column, old_logp) _(column, ref_logp) _(column, kl_coef) \
  _(column, entropy_coef) _(column, clip_low) _(column, clip_high) _(column, dual_clip)                   \
  _(column, rollout_weight) _(column, distill) _(column, temperature) _(column, target_logit)   \
  _(column, ref_target_logit)

#define FASTSCHED_KL_KINDS(_) _(kl, none) _(kl, k1) _(kl, k2) _(kl, k3) _(kl, exact)

// What row_stats returns of each row and row_dlogits_ reads.
#define FASTSCHED_STATE(_)                                                                          \
  _(state, logp) _(state, entropy) _(state, kl) _(state, top) _(state, log_sum) _(state, mean)      \
  _(state, gap) _(state, ref_top)

// Derivatives of the loss by the three statistics.
#define FASTSCHED_COEFFICIENTS(_) _(coefficient, logp) _(coefficient, entropy) _(coefficient, kl)

// What policy_rows_ returns of each row; size is |c_logp| + |c_entropy| + |c_kl|.
#define FASTSCHED_RESULT(_)                                                                            \
  _(result, loss) _(result, logp) _(result, entropy) _(result, kl) _(result, ratio) _(result, clipped) \
  _(result, size)

#define FASTSCHED_FLAGS(_) _(flag, on_policy) _(flag, cispo) _(flag, has_target_logit) _(flag, backward) \
  _(flag, has_ref_target_logit)

#define FASTSCHED_ENUMERATOR(group, name) name,

namespace fastsched {

namespace column { enum : int64_t { FASTSCHED_COLUMNS(FASTSCHED_ENUMERATOR) count }; }
namespace kl { enum : int64_t { FASTSCHED_KL_KINDS(FASTSCHED_ENUMERATOR) count }; }
namespace state { enum : int64_t { FASTSCHED_STATE(FASTSCHED_ENUMERATOR) count }; }
namespace coefficient { enum : int64_t { FASTSCHED_COEFFICIENTS(FASTSCHED_ENUMERATOR) count }; }
namespace result { enum : int64_t { FASTSCHED_RESULT(FASTSCHED_ENUMERATOR) count }; }
namespace flag { enum : int64_t { on_policy = 1, cispo = 2, has_target_logit = 4, backward = 8, has_ref_target_logit = 16 }; }  // bits

}  // namespace fastsched
