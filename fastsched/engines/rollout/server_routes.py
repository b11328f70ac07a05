"""Routes of a rollout server: a whole batch in one request, in a fixed order, with exact log-probabilities.

Bodies are JSON, answers .npz (NumPy, no pickle): R responses one after another, T tokens in all.
"""

import io
import itertools

import numpy as np
from fastapi import APIRouter, HTTPException, Request, Response
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from fastsched.engines.rollout.vllm_engine import sampled_logp

router = APIRouter()
_numbers = itertools.count()


@router.post("/fastsched/generate")
async def generate(request: Request) -> Response:
    """{"prompts": [{"token_ids", "seeds"}], "sampling": {...}} -> lengths [R], token_ids [T], logp [T], stopped [R], versions [R].

    One response for each seed. The engine is paused while the batch comes in, so that its composition does not depend on timing, and
    the prefix cache starts empty: equal batches give equal bits.
    """
    body = await request.json()
    engine = request.app.state.engine_client
    asked = [(prompt["token_ids"], SamplingParams(seed=seed, **body["sampling"]))
             for prompt in body["prompts"] for seed in prompt["seeds"]]
    if not await engine.reset_prefix_cache():
        raise HTTPException(503, "vLLM refused to drop its prefix cache: requests of another run, or that never ended, still hold it")
    outputs = [output.outputs[0] for output in await _run(engine, asked)]
    versions = [{span.version for span in output.weight_versions} for output in outputs]
    return _npz(lengths=np.array([len(output.token_ids) for output in outputs], np.int64),
                token_ids=np.concatenate([np.asarray(output.token_ids, np.int64) for output in outputs]),
                logp=np.concatenate([sampled_logp(output.token_ids, output.logprobs) for output in outputs]),
                stopped=np.array([output.finish_reason == "stop" for output in outputs]),
                versions=np.array([",".join(sorted(version)) for version in versions]))


@router.post("/fastsched/score")
async def score(request: Request) -> Response:
    """{"token_ids": [n]} -> logp [n - 1] of each token after the first, temperature 1."""
    token_ids = (await request.json())["token_ids"]
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    output, = await _run(request.app.state.engine_client, [(token_ids, params)])
    return _npz(logp=sampled_logp(token_ids[1:], output.prompt_logprobs[1:]))


async def _run(engine, asked: list[tuple[list[int], SamplingParams]]) -> list:
    from vllm.sampling_params import RequestOutputKind

    await engine.pause_generation(mode="keep", clear_cache=False)
    try:
        waiting = []
        for token_ids, params in asked:
            params.output_kind = RequestOutputKind.FINAL_ONLY
            waiting.append(await engine.add_request(f"fastsched-{next(_numbers)}", TokensPrompt(prompt_token_ids=token_ids), params))
    finally:
        await engine.resume_generation()
    return [await collector.get() for collector in waiting]


def _npz(**arrays: np.ndarray) -> Response:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return Response(buffer.getvalue(), media_type="application/octet-stream")
