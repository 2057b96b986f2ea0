"""Windows, oracle answers and the folder that the world tests share: each oracle runs once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from oracle import tiny_models, trajectories
