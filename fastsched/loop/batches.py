"""The groups that one step trains: all new, completed after a screen (SPEED), or partly replayed from earlier steps (DOTS)."""

from dataclasses import replace
from typing import Sequence

import numpy as np

from fastsched.groups import flat_groups, mixed_groups
from fastsched.loop.assemble import Run
from fastsched.loop.buffers import Group
from fastsched.loop.rollouts import Rollouts, join_outcomes, one_batch, roll_out, staleness
from fastsched.types import Outcomes, Selection

ROUNDS = 4  # generations of one step at most, while no screened group is complete


def train_batch(run: Run, step: int) -> Rollouts:
    """This rank's groups of the step; `outcomes` are those of everything that was rolled out now, never of replayed groups.

    With `rollout.sleep` the sampler sleeps from here to the next sync.
    """
    make = {"plain": roll_out, "screened": screened, "replayed": replayed}
    rolled = make[run.cfg.scheduler.traits.batch](run, step, run.cfg.train.prompts_per_step)
    if run.cfg.rollout.sleep:
        run.rollout.sleep()
    return rolled


def screened(run: Run, step: int, wanted: int) -> Rollouts:
    """SPEED-RL (arXiv 2506.09016, algorithms.md 3): groups of prompts that passed a screen, with all their G responses.

    One generation fuses the remaining responses of the `wanted` groups that have waited longest, fewer when there are not so many,
    with the screen of new candidates, of which those with 0 < success rate < 1 wait from then on. A generation that found no
    group waiting (the first step's) is followed by another; the last of ROUNDS completes candidates that did not pass,
    so that a step always trains something and the guard against runs without signal sees it.
    """
    rejected, parts = [], []
    for number in range(ROUNDS):
        waiting = run.buffer.take(wanted)
        if not waiting and number == ROUNDS - 1:
            waiting = _gathered(run, rejected)[:wanted]
        part, groups = _fused(run, step, number, waiting, wanted)
        parts.append(part)
        rejected = _keep_passed(run, part.outcomes, groups, len(waiting))
        if waiting:
            break
    complete = [_completed(waiting[i], group) for i, group in groups if i < len(waiting)]
    return _trained(run, step, complete, join_outcomes([p.outcomes for p in parts]), part.probe, len(waiting))


def _fused(run: Run, step: int, number: int, waiting: list[Group], wanted: int) -> tuple[Rollouts, list[tuple[int, Group]]]:
    """One generation for `waiting` and for candidates; this rank's part of it as groups, with their places in the selection."""
    rows = np.array([group.row for group in waiting], np.int64)
    left = np.array([run.cfg.rollout.responses - len(group.responses) for group in waiting], np.int64)
    if len(run.buffer) < wanted:
        with run.log.phase("control"):
            drawn = run.scheduler.next_prompts(wanted - len(run.buffer))
        new = ~np.isin(drawn.rows, [*rows.tolist(), *run.buffer.groups])
        rows, left = np.concatenate([rows, drawn.rows[new]]), np.concatenate([left, drawn.responses[new]])
    part = one_batch(run, Selection(rows, run.train_set.bins[rows].astype(np.int64), left), step, number)
    continued = np.arange(len(rows)) < len(waiting)
    return replace(part, outcomes=replace(part.outcomes, continued=continued)), _groups(run, part, left)


def _keep_passed(run: Run, outcomes: Outcomes, groups: list[tuple[int, Group]], first: int) -> list[tuple[int, Group]]:
    """Candidates, places `first` and on, that passed go to the buffer of every rank; returns this rank's others."""
    passed = mixed_groups(outcomes.rewards, run.scheduler.success.r_threshold)
    candidates = [(i, group) for i, group in groups if i >= first]
    kept = [(i, group) for i, group in candidates if passed[i] and group.usable]
    run.buffer.put(_gathered(run, kept))
    return [(i, group) for i, group in candidates if not passed[i] or not group.usable]


def _completed(screen: Group, rest: Group) -> Group:
    return Group(screen.row, screen.responses + rest.responses, np.concatenate([screen.rewards, rest.rewards]))


def replayed(run: Run, step: int, wanted: int) -> Rollouts:
    """DOTS with rollout replay (arXiv 2506.05316): a share of the batch from the buffer, the rest new, which then enters the buffer.

    Replayed groups are a random choice that holds no prompt of the new part; until the buffer can fill its share, more is new.
    Only groups with two different rewards are kept, until they are `dots.max_age` weight versions old.
    """
    ranks, dots = run.ranks, run.cfg.scheduler.dots
    run.buffer.forget(step - 1 - dots.max_age)
    old = min(int(dots.replay * wanted), len(run.buffer))
    fresh = roll_out(run, step, wanted - old)
    rng = np.random.default_rng([run.cfg.train.seed, step, old])
    again = run.buffer.sample(old, set(fresh.outcomes.rows.tolist()), rng)
    signal = ~flat_groups(fresh.outcomes.rewards)
    groups = _groups(run, fresh, np.full(len(signal), run.cfg.rollout.responses))
    run.buffer.put(_gathered(run, [(i, group) for i, group in groups if signal[i] and group.usable]))
    mine = [group for _, group in groups] + again[ranks.rank::ranks.world_size]
    return _trained(run, step, mine, fresh.outcomes, fresh.probe, fresh.trained + len(again))


def _groups(run: Run, part: Rollouts, counts: np.ndarray) -> list[tuple[int, Group]]:
    """This rank's groups of one generation with their places in its selection, whose prompts have `counts` responses [P]."""
    ranks, start, groups = run.ranks, 0, []
    for k, i in enumerate(ranks.mine(len(counts))):
        responses = tuple(part.responses[start:start + counts[i]])
        groups.append((i, Group(part.prompts[k].row, responses, part.rewards[k, :counts[i]])))
        start += counts[i]
    return groups


def _gathered(run: Run, groups: list[tuple[int, Group]]) -> list[Group]:
    """The groups of all ranks by place."""
    everywhere = [entry for part in run.ranks.all_gather(groups) for entry in part]
    return [group for _, group in sorted(everywhere, key=lambda entry: entry[0])]


def _trained(run: Run, step: int, groups: Sequence[Group], outcomes: Outcomes, probe: list[int], trained: int) -> Rollouts:
    responses = [r for group in groups for r in group.responses]
    texts = run.tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True) if responses else []
    rewards = np.array([group.rewards for group in groups]).reshape(len(groups), run.cfg.rollout.responses)
    return Rollouts([run.train_set.prompt(group.row) for group in groups], responses, rewards, texts, outcomes, probe, trained,
                    staleness=staleness(run, responses, step))
