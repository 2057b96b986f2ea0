"""Write Python's own manual (`pydoc_data.topics`, 0.7 MB of technical English) as documents for next-token training.

python examples/lastkv/prepare.py --out .cache/lastkv/topics.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from pydoc_data.topics import topics


def main() -> None:
    parser = argparse.ArgumentParser(description="Write pydoc's topics as one JSON line each.")
    parser.add_argument("--out", type=Path, default=Path(".cache/lastkv/topics.jsonl"), help="file to write")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for name in sorted(topics):
            file.write(json.dumps({"id": name, "text": topics[name]}) + "\n")
    os.replace(temporary, out)
    print(f"{out}: {len(topics)} documents")


if __name__ == "__main__":
    main()
