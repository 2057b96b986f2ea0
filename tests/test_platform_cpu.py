"""Claim: `platform_cpu` leaves `with torch.device(...)` as it was.

Why the test shows it: torch recognises factories by identity, from a cache that is filled at the first use of a device
context; a fresh interpreter patches before any such use, which is the order in which a patched factory would be taken
for the real one. transformers loads models under the meta device: with the context broken it computes wrong numbers
without an error.
Not shown: the other patched names, which Megatron-Core exercises in every test with ranks.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from megatron_lrl import platform_cpu
platform_cpu._patch_torch()
with torch.device("meta"):
    made = [torch.zeros(1), torch.ones(1), torch.empty(1), torch.full((1,), 2.0), torch.tensor(1.0)]
print(*(tensor.device.type for tensor in made))
print(torch.zeros(1, device="cuda").device, torch.zeros(1).device)
"""


def test_a_device_context_still_reaches_the_patched_factories() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["meta"] * 5 + ["cpu"] * 2
