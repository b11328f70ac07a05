"""policy_rows_ of every implementation in fp32 against PyTorch in fp64: each number within the rounding of what is added up for it."""

from typing import NamedTuple

import pytest
import torch
from fastsched_kernels import rows_pytorch
from fastsched_kernels.reference import KL_KINDS, LOG_LIMIT, Objective, scaled
from fastsched_kernels.table import Coefficients, PolicyRows
from fastsched_kernels.testing import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from row_implementations import compiled, each
from torch import Tensor

INF = float("inf")
EPS = 2.0**-17
"""Of a term: an exponential is right to 20 units in the last place and is divided by a sum of such, 4.8e-6 together; the rest is for
some forty roundings of fp32."""


class Case(NamedTuple):
    n: int
    v: int
    kl: str
    seed: int
    on_policy: bool = False
    cispo: bool = False
    temperature: float = 1.0
    softcap: float | None = None
    fine: bool = False
    masked: float = 0.0


class Problem(NamedTuple):
    x: Tensor
    target: Tensor
    ref: Tensor | None
    objective: Objective
    temperature: float
    softcap: float | None
    target_logit: Tensor | None

    def policy_rows_(self, implementation, x: Tensor, backward: bool = True) -> PolicyRows:
        ref = None if self.ref is None else self.ref.to(x.dtype)
        return implementation.policy_rows_(
            x, self.target, ref, self.objective, self.temperature, self.softcap, self.target_logit, backward)


def problem(c: Case) -> Problem:
    g = seeded(c.seed)
    random = lambda scale=1.0, shift=0.0: torch.randn(c.n, generator=g) * scale + shift
    x, ref = (torch.randn(c.n, c.v, generator=g) * 2 for _ in range(2))
    target = torch.randint(c.v, (c.n,), generator=g)
    x[(torch.rand(c.n, c.v, generator=g) < c.masked).scatter(-1, target[:, None], False)] = -INF
    objective = Objective(
        advantage=random(), token_weight=random().abs(), old_logp=None if c.on_policy else random(0.3, -5), ref_logp=random(0.3, -5),
        kl=c.kl, kl_coef=random().abs(), entropy_coef=random(), clip_low=random(0.1).abs(), clip_high=random(0.1).abs(),
        dual_clip=1 + random().abs(), rollout_weight=random().abs(), distill=random(0.1), surrogate="cispo" if c.cispo else "clip",
    )
    fine = x.gather(-1, target[:, None]).squeeze(-1) + 0.01 if c.fine else None
    return Problem(x, target, ref if c.kl == "exact" else None, objective, c.temperature, c.softcap, fine)


class Row(NamedTuple):
    """One model's rows in fp64; -inf logits are 0 throughout, since they enter no sum."""

    p: Tensor  # [R, V]
    d: Tensor  # [R, V] z - top
    reach: Tensor  # [R, V] what d is rounded from
    log_sum: Tensor  # [R, 1]

    @staticmethod
    def of(x: Tensor, temperature: float, softcap: float | None) -> "Row":
        z = scaled(x.double(), temperature, softcap)
        live, top = z > -INF, z.amax(-1, keepdim=True)
        reach = torch.where(live, z.abs(), 0.0) + top.abs() + (0.0 if softcap is None else softcap / temperature)
        return Row(z.softmax(-1), torch.where(live, z - top, 0.0), reach, (z - top).exp().sum(-1, keepdim=True).log())


class Sizes(NamedTuple):
    """Sum of the absolute terms of each number of a row, with what their own errors become in it; and whether its branches are certain."""

    out: PolicyRows  # `clipped`: how near the ratio, the advantage or a bound is to the point where the branch changes, over EPS
    gradient: Tensor  # [R, V]


def sizes(p: Problem, truth: PolicyRows, c: Coefficients) -> Sizes:
    o, logp = p.objective, truth.logp
    row = Row.of(p.x, p.temperature, p.softcap)
    z_target = row.reach.gather(-1, p.target[:, None]).squeeze(-1)
    log_sum, mean = row.log_sum.squeeze(-1).abs(), (row.p * (row.d.abs() + row.reach)).sum(-1)
    s_logp, s_entropy = 1 + z_target + log_sum, 1 + log_sum + mean
    s_kl, s_d_kl, gap = _kl_sizes(p, row, logp, s_logp)
    to_ref, w = (logp - o.ref_logp).abs(), o.token_weight.double()
    advantage = o.advantage + o.distill * (o.ref_logp - logp)
    s_advantage = o.advantage.abs() + o.distill.abs() * (to_ref + s_logp + o.ref_logp.abs())
    s_ratio = truth.ratio * (1.0 if o.old_logp is None else 1 + s_logp + o.old_logp.abs())
    low, high = 1 - o.clip_low.double(), 1 + o.clip_high.double()
    if o.surrogate == "cispo":
        bound = truth.ratio.clamp(low, high)
    else:
        bound = torch.where(advantage > 0, truth.ratio.clamp(max=high), torch.minimum(truth.ratio.clamp(min=low), o.dual_clip))
    s_bound = torch.where(bound == truth.ratio, s_ratio, 1 + bound.abs())
    s_slope = s_bound * advantage.abs() + bound.abs() * s_advantage
    s_surrogate = s_slope if o.surrogate == "clip" else s_slope * logp.abs() + (bound * advantage).abs() * s_logp
    s_loss = w * (o.rollout_weight.abs() * s_surrogate + o.entropy_coef.abs() * s_entropy + o.kl_coef.abs() * s_kl)
    s_c_logp = w * (o.rollout_weight.abs() * s_slope + o.kl_coef.abs() * s_d_kl)
    margins = [(truth.ratio - b).abs() / (s_ratio + 1 + b.abs()) for b in (low, high, o.dual_clip)]
    margins += [advantage.abs() / s_advantage, (high - o.dual_clip).abs(), (low - o.dual_clip).abs()]
    out = PolicyRows(s_loss, s_logp, s_entropy, s_kl, s_ratio, torch.stack(margins).amin(0) / EPS, s_c_logp + c.entropy.abs() + c.kl.abs())
    return Sizes(out, _gradient_sizes(p, row, s_c_logp, c, mean, gap))


def _kl_sizes(p: Problem, row: Row, logp: Tensor, s_logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(of the KL, of its derivative by logp, of E[z - r]), each [R]."""
    d, s_d, zero = logp - p.objective.ref_logp, s_logp + p.objective.ref_logp.abs(), torch.zeros_like(logp)
    if p.objective.kl == "exact":
        ref = Row.of(p.ref, p.temperature, p.softcap)
        gap = (row.p * (row.d.abs() + ref.d.abs() + row.reach + ref.reach)).sum(-1)
        return 2 + gap + (row.log_sum.abs() + ref.log_sum.abs()).squeeze(-1), zero, gap
    inverse = (-d.clamp(-LOG_LIMIT, LOG_LIMIT)).exp()
    of_kind = {"none": (zero, zero), "k1": (s_d, zero), "k2": (d.abs() * s_d, s_d),
               "k3": ((1 - inverse).abs() * s_d + inverse + 1 + d.abs(), 1 + inverse * (1 + s_d))}
    return *of_kind[p.objective.kl], zero


def _gradient_sizes(p: Problem, row: Row, s_c_logp: Tensor, c: Coefficients, mean: Tensor, gap: Tensor) -> Tensor:
    at_target = torch.zeros_like(row.p).scatter_(-1, p.target[:, None], 1.0)
    column = lambda v: v.double().abs().unsqueeze(-1)
    s_p = (row.p + 2.0**-100) * (1 + row.reach + row.log_sum.abs())  # below that fp32 has nothing
    out = column(s_c_logp) * (at_target + row.p) + column(c.logp) * (at_target + s_p)
    out += column(c.entropy) * s_p * (column(mean) + row.d.abs() + row.reach)
    if p.ref is not None:
        ref = Row.of(p.ref, p.temperature, p.softcap)
        out += column(c.kl) * s_p * (column(gap) + row.d.abs() + ref.d.abs() + row.reach + ref.reach)
    return out / p.temperature


def coefficients(p: Problem) -> Coefficients:
    """fp64, from the derivatives of the loss on its own statistics."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_pytorch, "row_dlogits_", lambda x, target, ref, state, c, *rest: found.append(c))
        p.policy_rows_(rows_pytorch, p.x.double())
    return found[0]


def check(implementation, case: Case, every_row: bool) -> None:
    """With `every_row` the case is one in which no rounding decides a branch; else rows in which it may are left out."""
    p = problem(case)
    mine, true = p.x.clone(), p.x.double()
    out, truth = p.policy_rows_(implementation, mine), p.policy_rows_(rows_pytorch, true)
    bound = sizes(p, truth, coefficients(p))
    certain = bound.out.clipped > 1
    assert certain.all() or not every_row
    assert torch.equal(out.clipped[certain], truth.clipped[certain])
    for name in set(out._fields) - {"clipped"}:
        error, allowed = (getattr(out, name) - getattr(truth, name)).abs(), EPS * getattr(bound.out, name)
        if name == "kl" and case.kl == "none":
            assert out.kl.isnan().all()
        else:
            assert (error <= allowed)[certain].all(), f"{name}: {error.tolist()} of {allowed.tolist()}"
    assert ((mine - true).abs() <= EPS * bound.gradient)[certain].all(), "gradient"
    before = p.x.clone()
    only = p.policy_rows_(implementation, p.x, backward=False)
    torch.testing.assert_close(only.loss, out.loss)
    assert torch.equal(p.x, before) and not torch.equal(p.x, mine)


CASES = {
    f"{kl}-{'on' if on_policy else 'off'}_policy-{'cispo' if cispo else 'clip'}":
        Case(4, 300, kl, 10 * i + 2 * on_policy + cispo, on_policy, cispo)
    for i, kl in enumerate(KL_KINDS) for on_policy in (False, True) for cispo in (False, True)
} | {
    "exact KL of two tokens, the gradient cancels to 1e-7": Case(1, 2, "exact", 647),
    "exact KL of two tokens, the gradient cancels to 8e-7": Case(1, 2, "exact", 416),
    "exact KL of two tokens, the loss cancels to 2e-5": Case(1, 2, "exact", 249),
    "cold": Case(9, 300, "exact", 1, temperature=0.2),
    "hot, masked": Case(7, 255, "k3", 2, temperature=3.0, masked=0.9),
    "softcap, exact KL, masked": Case(5, 257, "exact", 3, temperature=0.7, softcap=3.0, masked=0.5),
    "softcap, target logit": Case(5, 17, "k2", 4, softcap=3.0, fine=True),
    "target logit": Case(9, 100, "k1", 5, fine=True),
}


@each
@pytest.mark.parametrize("name", CASES)
def test_one_launch_equals_the_pytorch_rows(implementation, name):
    check(implementation, CASES[name], every_row=True)


@pytest.mark.slow
@compiled
@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        Case, n=st.integers(1, 9), v=st.integers(2, 300), kl=st.sampled_from(KL_KINDS), seed=st.integers(0, 10**6), on_policy=st.booleans(),
        cispo=st.booleans(), temperature=st.floats(0.2, 3.0), softcap=st.sampled_from([None, 3.0]), fine=st.booleans(),
        masked=st.floats(0, 0.9),
    )
)
def test_one_launch_equals_the_pytorch_rows_anywhere(implementation, case):
    check(implementation, case, every_row=False)


@pytest.mark.parametrize("number", ["advantage", "kl_coef", "entropy_coef", "rollout_weight", "distill", "token_weight", "ref_logp"])
def test_a_number_that_is_a_hundredth_off_is_found(number):
    """The bounds are for rounding only."""

    class Off:
        @staticmethod
        def policy_rows_(x, target, ref, o, *rest):
            return rows_pytorch.policy_rows_(x, target, ref, o._replace(**{number: getattr(o, number) * 1.01}), *rest)

    with pytest.raises(AssertionError, match="loss|kl|size|gradient"):
        check(Off, Case(9, 300, "k3", 42), every_row=True)
