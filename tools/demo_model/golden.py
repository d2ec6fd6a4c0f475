"""Makes dsv4/testing/data/golden_flash_mini.json: greedy continuations of the shipped checkpoints, with tokens' leads.

    python tools/demo_model/golden.py

Of the prompts below the twelve are kept whose least certain token leads its rival by most, in `official` numerics: what
is recorded should not hang on the last bit of a sum. A text that recites a recall task is left out, however certain.
`exact` and the NVFP4 checkpoint continue the same twelve.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from dsv4 import LLM, EngineConfig, SamplingParams

OUT = Path(__file__).parents[2] / "dsv4" / "testing" / "data" / "golden_flash_mini.json"
NUM_KEPT, NUM_TOKENS = 12, 16
LIMITS = EngineConfig(max_context_tokens=128, max_concurrent_requests=16)
PROMPTS = """\
This program is free software; you can redistribute it
And the LORD spake unto Moses, saying,
KING RICHARD III\\n\\nby William
And he reigned in his stead. And the rest of the acts of
/* This is a
This module defines the following
The following table lists the
Return a new
The user can specify
The sons of Judah;
A Python string is
The name of the
If the file does not
And it came to pass in those days,
In the beginning God created
Now therefore, O LORD,
Thus saith the LORD of hosts, the God of
And Jesus answered and said unto
Enter a
My lord, I
What is the
The function returns
This option is
This function is
The default value is
For example, the
Note that the
It is possible to
The kernel will
The first argument is
When the value of
SELECT * FROM
An error is raised if the
The number of
Changed in version 3.
See also the
This is the
The children of Israel
Come, let us
And the priest shall
Behold, the days come, saith the
Verily, verily, I say unto
Then said Jesus unto
And God said, Let there be
Good morrow, my
Exit
ACT V. SCENE
Enter KING HENRY, with
[Exeunt
What, ho! my
By my troth, I
O, my good
The king of Israel
He shall not
It is written,
This document describes the
Copyright (C) 2001 Free Software
The GNU General Public
You should have received a copy of
You can use the
To create a new
The syntax of the
This parameter is
Returns a list of
The return value is
The server will
The client sends a
The database is
A table is
The query planner
This chapter describes
If you want to
There are two
The path to the
In this case, the
Use this option to
The process is
A pointer to
And the sons of Benjamin
Therefore thus saith the Lord
I pray thee, let me
Go to, go to;
Thou art a
Sir, I am
As for the other
The length of the
Each element of the
The old value of
""".rstrip("\n").split("\n")


def continuations(llm: LLM, prompts: list[str]) -> list[dict[str, Any]]:
    """Greedy text of each prompt; `gaps` are the nats between a token and its closest rival."""
    rows = []
    for found, prompt in zip(
        llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0)), prompts, strict=True
    ):
        start = len(llm.encode(prompt))
        logits = llm.logits([*llm.encode(prompt), *found.token_ids[:-1]])[start - 1 :].double()
        best = logits.log_softmax(-1).topk(2, -1).values
        gaps = [round(gap, 4) for gap in (best[:, 0] - best[:, 1]).tolist()]
        rows.append({"prompt": prompt, "text": found.text, "token_ids": list(found.token_ids), "gaps": gaps})
    return rows


def main() -> None:
    prompts = [prompt.replace("\\n", "\n") for prompt in PROMPTS]
    rows = continuations(LLM("flash-mini", engine=LIMITS), prompts)
    rows = [row for row in rows if "song" not in row["text"].lower() and "Remember" not in row["text"]]
    clearest = sorted(rows, key=lambda row: -min(row["gaps"]))[:NUM_KEPT]
    kept = [row["prompt"] for row in clearest]
    golden = {
        "flash-mini/official": clearest,
        "flash-mini/exact": continuations(LLM("flash-mini", numerics="exact", engine=LIMITS), kept),
        "flash-mini-nvfp4/official": continuations(LLM("flash-mini-nvfp4", engine=LIMITS), kept),
    }
    OUT.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, found in golden.items():
        print(f"{name}: least lead {min(min(row['gaps']) for row in found):.3f} nats")


if __name__ == "__main__":
    main()
