# SPDX-License-Identifier: Apache-2.0
"""A server of an exported model in plain torch: written from docs/reference/checkpoints.md, without sennit.

test_serving.py runs it with `asked` (columns of raw samples by name) and the file as the argument. Prints logits.
"""

import bisect
import itertools
import json
import sys
from typing import Any

import torch

MASK = (1 << 64) - 1


def twang_mix64(x: int) -> int:
    x = (~x + (x << 21)) & MASK
    x ^= x >> 24
    x = (x + (x << 3) + (x << 8)) & MASK
    x ^= x >> 14
    x = (x + (x << 2) + (x << 4)) & MASK
    x ^= x >> 28
    return (x + (x << 31)) & MASK


def hash_combine(first: int, second: int) -> int:
    city = 0x9DDFEA08EB382D69
    a = (second ^ first) * city & MASK
    a ^= a >> 47
    b = (first ^ a) * city & MASK
    b ^= b >> 47
    return b * city & MASK


def sigrid_hash(number: int, salt: int, rows: int) -> int:
    mixed = hash_combine(salt & MASK, twang_mix64(number & MASK))
    signed = mixed - (1 << 64) if mixed >> 63 else mixed
    return signed % rows


def number_of(value: float | None, about: dict[str, Any]) -> float:
    if value is None:
        return 0.0
    x = torch.tensor(float(value))
    if about["clamp"] is not None:
        x = x.clamp(*about["clamp"])
    if about["log1p"]:
        x = torch.log1p(x.to(torch.bfloat16).to(torch.float32))
    scaled: float = (float(x) - about["mean"]) / about["deviation"]
    return scaled


def rows_of(value: Any, about: dict[str, Any]) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None and about["encode"] != "dictionary" else [value]
    values = values[: about["first"]]
    if about["encode"] == "id":
        return [part for part in values if part is not None]
    if about["encode"] == "hash":
        return [sigrid_hash(part, about["salt"], about["rows"]) for part in values if part is not None]
    known = about["values"]
    places = [0 if part is None else bisect.bisect_left(known, part) for part in values]
    return [
        place + 1 if part is not None and place < len(known) and known[place] == part else 0
        for place, part in zip(places, values, strict=True)
    ]


def mlp(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str, *, last_relu: bool) -> torch.Tensor:
    own = [key.split(".") for key in weights if key.startswith(f"{name}.")]
    numbers = sorted({int(number) for _, number, _ in own})
    for number in numbers:
        x = torch.nn.functional.linear(x, weights[f"{name}.{number}.weight"], weights[f"{name}.{number}.bias"])
        if last_relu or number != numbers[-1]:
            x = x.relu()
    return x


model = torch.load(sys.argv[1], weights_only=True, mmap=True)
preprocessing, samples = model["preprocessing"], globals()["asked"]["samples"]
columns = [[number_of(value, part) for value in samples[part["name"]]] for part in preprocessing["dense"]]
first = mlp(torch.tensor(columns).T.contiguous(), model["dense"], "bottom", last_relu=True)
vectors = [first]
about_of = {part["name"]: part for part in preprocessing["sparse"]}
for table in model["model"]["tables"]:
    bags = [rows_of(value, about_of[table]) for value in samples[table]]
    starts = list(itertools.accumulate([len(bag) for bag in bags], initial=0))[:-1]
    ids = torch.tensor([row for bag in bags for row in bag], dtype=torch.int64)
    rows = model["tables"][table]
    vectors.append(torch.ops.quantized.embedding_bag_byte_rowwise_offsets(rows, ids, torch.tensor(starts)))
pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
logits = mlp(torch.cat((first, torch.stack(pairs, 1)), 1), model["dense"], "top", last_relu=False).squeeze(1)
print(json.dumps(logits.tolist()))
