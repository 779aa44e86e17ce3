"""Uploads the parameters of the GPU sampling kernel, and calls the kernel.

Nothing here waits for the device, so that a step can be launched before the previous step has
ended. Refuses to know: penalties, grammars, logprobs; rows that need these are sampled in
`sampler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Limits of the temperature, beyond which float32 overflows. Below the lower limit, sampling is as
# good as greedy; above the upper limit, all tokens are equally likely.
LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-6, 1e30
# Smallest top-p: any smaller value would become 0 in float32 and keep no token; this value keeps
# the best token.
LEAST_TOP_P = 1e-30

# Arrays begin at multiples of this number of 4-byte words, because Triton compiles other kernels
# for pointers without this alignment.
_ALIGNED_WORDS = 4

# Names and types of the kernel's parameters, each `[num_requests]`; keys are `[num_requests, 2]`.
PARAMETER_TYPES: Mapping[str, torch.dtype] = {
    "temperatures": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "keys": torch.int32,
}


def kernel_parameters(parameters: npt.NDArray[np.void]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays that `PARAMETER_TYPES` names except the keys, which change in each step.

    Args:
        parameters: `[num_requests]` of `sampling_input.PARAMETERS`.
    """
    temperatures = parameters["temperature"]
    clipped = temperatures.clip(LEAST_TEMPERATURE, LARGEST_TEMPERATURE)
    return {
        "temperatures": np.where(temperatures == 0, 0, clipped).astype(np.float32),
        "top_k": parameters["top_k"].clip(0, 2**31 - 1).astype(np.int32),
        "top_p": parameters["top_p"].clip(LEAST_TOP_P, 1).astype(np.float32),
        "min_p": parameters["min_p"].astype(np.float32),
    }


def kernel_arrays(
    parameters: npt.NDArray[np.void], keys: npt.NDArray[np.uint32]
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays that `PARAMETER_TYPES` names, on the host.

    Args:
        parameters: `[num_requests]` of `sampling_input.PARAMETERS`.
        keys: `[num_requests, 2]`, contiguous.
    """
    return {**kernel_parameters(parameters), "keys": keys.view(np.int32)}


def sample_on_device(logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Sample one token per row with the Triton kernel; return `[num_requests]` int64, on the
    device.

    A row with NaN or plus infinity gives `NO_TOKEN`, which is no valid index: callers must clamp it
    before they use it as an index.

    Args:
        logits: `[num_requests, vocab_size]`, of any floating dtype.
        tensors: tensors that `PARAMETER_TYPES` names, on the same device.
    """
    # Import late, because Triton is slow to import, and decides at its import whether kernels are
    # interpreted.
    from baton_kernels.triton.sampling.tokens import sample_tokens

    return sample_tokens(
        logits,
        tensors["temperatures"],
        tensors["top_k"],
        tensors["top_p"],
        tensors["min_p"],
        tensors["keys"],
    )


def upload_parameters(
    parameters: npt.NDArray[np.void], keys: npt.NDArray[np.uint32], device: torch.device
) -> dict[str, Tensor]:
    """Return `kernel_arrays` on the device, uploaded in one asynchronous copy.

    Each array begins at a multiple of 16 bytes for any number of requests; otherwise Triton would
    recompile kernels while serving.
    """
    arrays = kernel_arrays(parameters, keys)
    starts = list(accumulate((_round_up(array.size) for array in arrays.values()), initial=0))
    packed = np.zeros(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays.values(), strict=False):
        packed[start : start + array.size] = array.view(np.int32).ravel()
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        # This pinned memory may be freed here: torch reuses it only after the copy has ended.
        host = host.pin_memory().to(device, non_blocking=True)
    tensors = {}
    for start, (name, array) in zip(starts, arrays.items(), strict=False):
        words = host[start : start + array.size]
        tensors[name] = words.view(PARAMETER_TYPES[name]).view(array.shape)
    return tensors


def _round_up(num_words: int) -> int:
    return -(-num_words // _ALIGNED_WORDS) * _ALIGNED_WORDS
