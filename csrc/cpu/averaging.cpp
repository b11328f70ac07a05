// ema_and_drift_: one pass over a list of tensors, in pieces that no thread count changes.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "../ops.h"

namespace fastsched::cpu {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kPiece = 1 << 15;
constexpr int64_t kBlock = 1024;  // summed in fp32, then carried in fp64

struct Sums {
  double drift = 0, norm = 0;
};

double sum_of(Vec value) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, value);
}

Sums update_block(float* avg, const float* param, int64_t n, float weight) {
  const Vec w(weight);
  Vec drift(0.0f), norm(0.0f);
  int64_t i = 0;
  auto step = [&](int64_t count) {
    Vec a = Vec::loadu(avg + i, count), p = Vec::loadu(param + i, count);
    a = at::vec::fmadd(w, p - a, a);
    a.store(avg + i, count);
    Vec d = p - a;
    drift = at::vec::fmadd(d, d, drift);
    norm = at::vec::fmadd(a, a, norm);
  };
  for (; i + Vec::size() <= n; i += Vec::size()) step(Vec::size());
  if (i < n) step(n - i);
  return {sum_of(drift), sum_of(norm)};
}

Sums update_piece(float* avg, const Tensor& param, int64_t begin, int64_t end, float weight) {
  Sums total;
  float buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    int64_t n = std::min(kBlock, end - i);
    const float* p = buffer;
    if (param.scalar_type() == at::kFloat) {
      p = param.const_data_ptr<float>() + i;
    } else {
      at::vec::convert<at::BFloat16, float>(param.const_data_ptr<at::BFloat16>() + i, buffer, n);
    }
    Sums s = update_block(avg + i, p, n, weight);
    total.drift += s.drift;
    total.norm += s.norm;
  }
  return total;
}

}  // namespace

Tensor ema_and_drift_(at::TensorList avg, at::TensorList params, double alpha) {
  struct Piece {
    size_t tensor;
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  for (size_t t = 0; t < avg.size(); ++t) {
    for (int64_t i = 0; i < avg[t].numel(); i += kPiece) pieces.push_back({t, i, std::min(i + kPiece, avg[t].numel())});
  }
  std::vector<Sums> sums(pieces.size());
  float weight = static_cast<float>(1.0 - alpha);
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const Piece& p = pieces[k];
      sums[k] = update_piece(avg[p.tensor].mutable_data_ptr<float>(), params[p.tensor], p.begin, p.end, weight);
    }
  });
  Tensor out = at::empty({2}, at::kDouble);
  double* o = out.mutable_data_ptr<double>();
  o[0] = o[1] = 0;
  for (const Sums& s : sums) o[0] += s.drift, o[1] += s.norm;
  return out;
}

}  // namespace fastsched::cpu
