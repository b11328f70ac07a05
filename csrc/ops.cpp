// Table of contents: the schema of every op and the check of its arguments.
#include "ops.h"

#include <torch/library.h>

namespace fastsched {

void check_average(at::TensorList avg, at::TensorList params) {
  TORCH_CHECK_VALUE(avg.size() == params.size(), avg.size(), " averages for ", params.size(), " parameters");
  for (size_t i = 0; i < avg.size(); ++i) {
    auto type = params[i].scalar_type();
    TORCH_CHECK_VALUE(avg[i].device() == avg[0].device() && params[i].device() == avg[0].device(), "tensor ", i,
                      ": averages and parameters must lie on one device, got ", avg[i].device(), " and ", params[i].device(),
                      " beside ", avg[0].device());
    TORCH_CHECK_NOT_IMPLEMENTED(avg[i].scalar_type() == at::kFloat && (type == at::kFloat || type == at::kBFloat16), "tensor ", i,
                                ": need an fp32 average and fp32 or bf16 parameters");
    TORCH_CHECK_VALUE(avg[i].sizes() == params[i].sizes() && avg[i].is_contiguous() && params[i].is_contiguous(), "tensor ", i,
                      ": need contiguous tensors of equal shapes");
  }
}

namespace {

void check_rows(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits) {
  auto type = logits.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type == at::kFloat || type == at::kBFloat16, "logits must be fp32 or bf16, got ", type);
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.stride(1) == 1, "logits must be [R, V] with contiguous rows");
  TORCH_CHECK_VALUE(target.dim() == 1 && target.size(0) == logits.size(0) && target.scalar_type() == at::kLong &&
                        target.is_contiguous(),
                    "target must be contiguous int64 [R]");
  if (ref_logits) {
    TORCH_CHECK_VALUE(ref_logits->sizes() == logits.sizes() && ref_logits->scalar_type() == type && ref_logits->stride(1) == 1,
                      "ref_logits must have the shape and dtype of logits and contiguous rows");
  }
}

// Where dlogits go: over the logits, or beside fp32 logits in the bf16 of the products that follow.
void check_out(const Tensor& out, const Tensor& logits) {
  auto type = out.scalar_type();
  TORCH_CHECK_VALUE(out.sizes() == logits.sizes() && out.stride(1) == 1 && (type == logits.scalar_type() || type == at::kBFloat16),
                    "out must have the shape of logits, contiguous rows and the dtype of logits or bf16");
}

void check_numbers(const Tensor& numbers, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK_VALUE(numbers.sizes() == shape && numbers.scalar_type() == at::kFloat && numbers.is_contiguous(), name,
                    " must be contiguous fp32 ", shape, ", got ", numbers.sizes());
}

void check_fine(const OptionalTensor& target_logit, const OptionalTensor& ref_target_logit, int64_t n) {
  if (target_logit) check_numbers(*target_logit, {n}, "target_logit");
  if (ref_target_logit) check_numbers(*ref_target_logit, {n}, "ref_target_logit");
}

Tensor row_stats(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& temperature,
                 double softcap, const OptionalTensor& target_logit, const OptionalTensor& ref_target_logit) {
  check_rows(logits, target, ref_logits);
  check_numbers(temperature, {temperature.numel() == 1 ? 1 : logits.size(0)}, "temperature");
  check_fine(target_logit, ref_target_logit, logits.size(0));
  return cpu::row_stats(logits, target, ref_logits, temperature, softcap, target_logit, ref_target_logit);
}

void row_dlogits_(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& state,
                  const Tensor& coefficients, const Tensor& temperature, double softcap, const OptionalTensor& target_logit,
                  const OptionalTensor& ref_target_logit, Tensor& out) {
  check_rows(logits, target, ref_logits);
  check_fine(target_logit, ref_target_logit, logits.size(0));
  check_out(out, logits);
  check_numbers(state, {state::count, logits.size(0)}, "state");
  check_numbers(coefficients, {coefficient::count, logits.size(0)}, "coefficients");
  check_numbers(temperature, {temperature.numel() == 1 ? 1 : logits.size(0)}, "temperature");
  cpu::row_dlogits_(logits, target, ref_logits, state, coefficients, temperature, softcap, target_logit, ref_target_logit, out);
}

Tensor policy_rows_(const Tensor& logits, const Tensor& target, const OptionalTensor& ref_logits, const Tensor& table, int64_t kl_kind,
                    int64_t flags, double softcap, Tensor& out) {
  check_rows(logits, target, ref_logits);
  check_out(out, logits);
  check_numbers(table, {logits.size(0), column::count}, "table");
  TORCH_CHECK_VALUE(kl_kind >= 0 && kl_kind < kl::count, "unknown KL kind ", kl_kind);
  TORCH_CHECK_VALUE((kl_kind == kl::exact) == ref_logits.has_value(), "exact KL and ref_logits go together");
  return cpu::policy_rows_(logits, target, ref_logits, table, kl_kind, flags, softcap, out);
}

Tensor ema_and_drift_(at::TensorList avg, at::TensorList params, double alpha) {
  check_average(avg, params);
  return cpu::ema_and_drift_(avg, params, alpha);
}

Tensor squared_norm(const Tensor& values) {
  auto type = values.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type == at::kFloat || type == at::kBFloat16, "values must be fp32 or bf16, got ", type);
  TORCH_CHECK_VALUE(values.is_contiguous(), "values must be contiguous");
  return cpu::squared_norm(values);
}

Tensor weighted_row_sums(const Tensor& words, const Tensor& factors) {
  TORCH_CHECK_NOT_IMPLEMENTED(words.scalar_type() == at::kLong && factors.scalar_type() == at::kLong, "need int64");
  TORCH_CHECK_VALUE(words.dim() == 2 && words.is_contiguous() && factors.sizes() == at::IntArrayRef({words.size(1)}) &&
                        factors.is_contiguous(),
                    "need contiguous words [R, W] and factors [W]");
  return cpu::weighted_row_sums(words, factors);
}

void add_(Tensor& total, const Tensor& part, bool first) {
  TORCH_CHECK_NOT_IMPLEMENTED(total.scalar_type() == at::kFloat && part.scalar_type() == at::kBFloat16, "need fp32 += bf16");
  TORCH_CHECK_VALUE(total.sizes() == part.sizes() && total.is_contiguous() && part.is_contiguous(),
                    "need contiguous tensors of equal shapes");
  cpu::add_(total, part, first);
}

void check_dlogits(const Tensor& dlogits) {
  auto type = dlogits.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type == at::kFloat || type == at::kBFloat16, "dlogits must be fp32 or bf16, got ", type);
  TORCH_CHECK_VALUE(dlogits.dim() == 2 && dlogits.stride(1) == 1, "dlogits must be [R, V] with contiguous rows");
}

void check_index(const Tensor& index, int64_t size) {
  TORCH_CHECK_VALUE(index.dim() == 1 && index.scalar_type() == at::kLong && index.is_contiguous(), "the index must be contiguous int64 [K]");
  if (index.numel()) {
    TORCH_CHECK_INDEX(index.min().item<int64_t>() >= 0 && index.max().item<int64_t>() < size, "index outside [0, ", size, ")");
  }
}

std::tuple<Tensor, Tensor> active_columns(const Tensor& dlogits, const Tensor& threshold) {
  check_dlogits(dlogits);
  check_numbers(threshold, {dlogits.size(0)}, "threshold");
  return cpu::active_columns(dlogits, threshold);
}

Tensor gather_columns(const Tensor& dlogits, const Tensor& columns) {
  check_dlogits(dlogits);
  check_index(columns, dlogits.size(1));
  return cpu::gather_columns(dlogits, columns);
}

void add_rows_(Tensor& total, const Tensor& rows, const Tensor& part) {
  auto type = part.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(total.scalar_type() == at::kFloat && (type == at::kFloat || type == at::kBFloat16), "need fp32 += fp32 or bf16");
  TORCH_CHECK_VALUE(total.dim() == 2 && part.dim() == 2 && part.size(0) == rows.size(0) && part.size(1) == total.size(1) &&
                        total.is_contiguous() && part.is_contiguous(),
                    "need contiguous total [V, H] and part [K, H]");
  check_index(rows, total.size(0));
  cpu::add_rows_(total, rows, part);
}

c10::Dict<std::string, int64_t> table_layout() {
  c10::Dict<std::string, int64_t> layout;
#define FASTSCHED_ENTRY(group, name) layout.insert(#group "." #name, group::name);
  FASTSCHED_COLUMNS(FASTSCHED_ENTRY)
  FASTSCHED_FLAGS(FASTSCHED_ENTRY)
  FASTSCHED_KL_KINDS(FASTSCHED_ENTRY)
  FASTSCHED_STATE(FASTSCHED_ENTRY)
  FASTSCHED_COEFFICIENTS(FASTSCHED_ENTRY)
  FASTSCHED_RESULT(FASTSCHED_ENTRY)
#undef FASTSCHED_ENTRY
  return layout;
}

}  // namespace
}  // namespace fastsched

TORCH_LIBRARY(fastsched_kernels, m) {
  m.def("capability() -> str", [] { return std::string(FASTSCHED_CAPABILITY); });
  m.def("table_layout() -> Dict(str, int)", fastsched::table_layout);
  m.def("row_stats(Tensor logits, Tensor target, Tensor? ref_logits, Tensor temperature, float softcap, Tensor? target_logit, "
        "Tensor? ref_target_logit) -> Tensor");
  m.def("row_dlogits_(Tensor logits, Tensor target, Tensor? ref_logits, Tensor state, Tensor coefficients, Tensor temperature, "
        "float softcap, Tensor? target_logit, Tensor? ref_target_logit, Tensor(a!) out) -> ()");
  m.def("policy_rows_(Tensor logits, Tensor target, Tensor? ref_logits, Tensor table, int kl, int flags, float softcap, "
        "Tensor(a!) out) -> Tensor");
  m.def("ema_and_drift_(Tensor(a!)[] avg, Tensor[] params, float alpha) -> Tensor");
  m.def("squared_norm(Tensor values) -> Tensor");
  m.def("weighted_row_sums(Tensor words, Tensor factors) -> Tensor");
  m.def("add_(Tensor(a!) total, Tensor part, bool first) -> ()");
  m.def("active_columns(Tensor dlogits, Tensor threshold) -> (Tensor, Tensor)");
  m.def("gather_columns(Tensor dlogits, Tensor columns) -> Tensor");
  m.def("add_rows_(Tensor(a!) total, Tensor rows, Tensor part) -> ()");
}

TORCH_LIBRARY_IMPL(fastsched_kernels, CPU, m) {
  m.impl("row_stats", fastsched::row_stats);
  m.impl("row_dlogits_", fastsched::row_dlogits_);
  m.impl("policy_rows_", fastsched::policy_rows_);
  m.impl("ema_and_drift_", fastsched::ema_and_drift_);
  m.impl("squared_norm", fastsched::squared_norm);
  m.impl("weighted_row_sums", fastsched::weighted_row_sums);
  m.impl("add_", fastsched::add_);
  m.impl("active_columns", fastsched::active_columns);
  m.impl("gather_columns", fastsched::gather_columns);
  m.impl("add_rows_", fastsched::add_rows_);
}
