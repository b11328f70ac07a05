// ema_and_drift_: one pass over a list of tensors, in pieces that no thread count changes.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "../ops.h"
#include "blocks.h"

namespace fastsched::cpu {
namespace {

struct Sums {
  double drift = 0, norm = 0;
};

Sums update_block(float* avg, const float* param, int64_t n, float weight) {
  const Vec w(weight);
  Vec drift(0.0f), norm(0.0f);
  by_vector(n, [&](int64_t i, int64_t count) {
    Vec a = Vec::loadu(avg + i, count), p = Vec::loadu(param + i, count);
    a = at::vec::fmadd(w, p - a, a);
    a.store(avg + i, count);
    Vec d = p - a;
    drift = at::vec::fmadd(d, d, drift);
    norm = at::vec::fmadd(a, a, norm);
  });
  return {sum_of(drift), sum_of(norm)};
}

Sums update_piece(float* avg, const Tensor& param, int64_t begin, int64_t end, float weight) {
  Sums total;
  float buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    int64_t n = std::min(kBlock, end - i);
    Sums s = update_block(avg + i, block_of(param, i, n, buffer), n, weight);
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
