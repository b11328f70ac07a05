"""The groups that one step trains: all new, completed after a screen (SPEED), or partly replayed from earlier steps (DOTS)."""

from dataclasses import replace

import numpy as np

from fastsched.groups import flat_groups, mixed_groups
from fastsched.loop.buffers import Group, GroupBuffer
from fastsched.loop.outcomes import join_outcomes
from fastsched.loop.rollouts import Rollouts, RolloutSource
from fastsched.types import Outcomes, Ranks, Selection

ROUNDS = 4  # generations of one step at most, while no screened group is complete


def train_batch(source: RolloutSource, buffer: GroupBuffer, step: int) -> Rollouts:
    """This rank's groups of the step; `outcomes` are those of everything that was rolled out now, never of replayed groups.

    With `rollout.sleep` the sampler sleeps from here to the next sync.
    """
    make = {"plain": all_new, "screened": screened, "replayed": replayed}
    rolled = make[source.cfg.scheduler.traits.batch](source, buffer, step, source.cfg.train.prompts_per_step)
    if source.cfg.rollout.sleep:
        source.rollout.sleep()
    return rolled


def all_new(source: RolloutSource, buffer: GroupBuffer, step: int, wanted: int) -> Rollouts:
    return source.roll_out(step, wanted)


def screened(source: RolloutSource, buffer: GroupBuffer, step: int, wanted: int) -> Rollouts:
    """SPEED-RL (arXiv 2506.09016, algorithms.md 3): groups of prompts that passed a screen, with all their G responses.

    One generation fuses the remaining responses of the `wanted` groups that have waited longest, fewer when there are not so many,
    with the screen of new candidates, of which those with 0 < success rate < 1 wait from then on. A generation that found no
    group waiting (the first step's) is followed by another; the last of ROUNDS completes candidates that did not pass,
    so that a step always trains something and the guard against runs without signal sees it.
    """
    rejected, parts = [], []
    for number in range(ROUNDS):
        waiting = buffer.take(wanted)
        if not waiting and number == ROUNDS - 1:
            waiting = _gathered(source.ranks, rejected)[:wanted]
        part, groups = _fused(source, buffer, step, number, waiting, wanted)
        parts.append(part)
        rejected = _put_passed(source, buffer, part.outcomes, groups, len(waiting))
        if waiting:
            break
    complete = [_completed(waiting[i], group) for i, group in groups if i < len(waiting)]
    return _trained(source, step, complete, replace(part, outcomes=join_outcomes([p.outcomes for p in parts]), trained=len(waiting)))


def _fused(source: RolloutSource, buffer: GroupBuffer, step: int, number: int, waiting: list[Group],
           wanted: int) -> tuple[Rollouts, list[tuple[int, Group]]]:
    """One generation for `waiting` and for candidates; this rank's part of it as groups, with their places in the selection."""
    rows = np.array([group.row for group in waiting], np.int64)
    left = np.array([source.cfg.rollout.responses - len(group.responses) for group in waiting], np.int64)
    if len(buffer) < wanted:
        with source.log.phase("control"):
            selection = source.scheduler.next_prompts(wanted - len(buffer))
        new = ~np.isin(selection.rows, [*rows.tolist(), *buffer.groups])
        rows, left = np.concatenate([rows, selection.rows[new]]), np.concatenate([left, selection.responses[new]])
    selection = Selection(rows, source.train_set.bins[rows].astype(np.int64), left)
    part = source.generate(source.drawn(selection, step, number), step)
    continued = np.arange(len(rows)) < len(waiting)
    return replace(part, outcomes=replace(part.outcomes, continued=continued)), _groups(source.ranks, part, left)


def _put_passed(source: RolloutSource, buffer: GroupBuffer, outcomes: Outcomes, groups: list[tuple[int, Group]],
                first: int) -> list[tuple[int, Group]]:
    """Candidates, places `first` and on, that passed go to the buffer of every rank; returns this rank's others."""
    passed = mixed_groups(outcomes.rewards, source.scheduler.success.r_threshold)
    candidates = [(i, group) for i, group in groups if i >= first]
    buffer.put(_gathered(source.ranks, [(i, group) for i, group in candidates if passed[i] and group.usable]))
    return [(i, group) for i, group in candidates if not passed[i] or not group.usable]


def _completed(screen: Group, rest: Group) -> Group:
    return Group(screen.row, screen.responses + rest.responses, np.concatenate([screen.rewards, rest.rewards]))


def replayed(source: RolloutSource, buffer: GroupBuffer, step: int, wanted: int) -> Rollouts:
    """DOTS with rollout replay (arXiv 2506.05316): a share of the batch from the buffer, the rest new, which then enters the buffer.

    Replayed groups are a random choice that holds no prompt of the new part; until the buffer can fill its share, more is new.
    Only groups with two different rewards are kept, until they are `dots.max_age` weight versions old.
    """
    ranks, dots = source.ranks, source.cfg.scheduler.dots
    buffer.forget(step - 1 - dots.max_age)
    old = min(int(dots.replay * wanted), len(buffer))
    fresh = source.roll_out(step, wanted - old)
    rng = np.random.default_rng([source.cfg.train.seed, step, old])
    again = buffer.sample(old, set(fresh.outcomes.rows.tolist()), rng)
    signal = ~flat_groups(fresh.outcomes.rewards)
    groups = _groups(ranks, fresh, np.full(len(signal), source.cfg.rollout.responses))
    buffer.put(_gathered(ranks, [(i, group) for i, group in groups if signal[i] and group.usable]))
    mine = [group for _, group in groups] + again[ranks.rank::ranks.world_size]
    return _trained(source, step, mine, replace(fresh, trained=fresh.trained + len(again)))


def _groups(ranks: Ranks, part: Rollouts, counts: np.ndarray) -> list[tuple[int, Group]]:
    """This rank's groups of one generation with their places in its selection, whose prompts have `counts` responses [P]."""
    start, groups = 0, []
    for k, i in enumerate(ranks.mine(len(counts))):
        responses = tuple(part.responses[start:start + counts[i]])
        groups.append((i, Group(part.prompts[k].row, responses, part.rewards[k, :counts[i]])))
        start += counts[i]
    return groups


def _gathered(ranks: Ranks, groups: list[tuple[int, Group]]) -> list[Group]:
    """The groups of all ranks by place."""
    everywhere = [entry for part in ranks.all_gather(groups) for entry in part]
    return [group for _, group in sorted(everywhere, key=lambda entry: entry[0])]


def _trained(source: RolloutSource, step: int, groups: list[Group], rolled: Rollouts) -> Rollouts:
    """`rolled` with `groups` in place of its own, which several draws have drawn."""
    responses = [r for group in groups for r in group.responses]
    rewards = np.array([group.rewards for group in groups]).reshape(len(groups), source.cfg.rollout.responses)
    return replace(rolled, prompts=[source.train_set.prompt(group.row) for group in groups], responses=responses, rewards=rewards,
                   texts=source.scorer.texts(responses), weights=(), staleness=source.staleness(responses, step))
