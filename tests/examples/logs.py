"""What a run wrote."""

import json
from pathlib import Path

TIMES = {"seconds", "tokens_per_second", "optimizer_seconds", "optimizer_share"}


def metrics(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without what no two runs have in common."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
