"""Writes smollm2_beam.json: transformers' beam search on SmolLM2 in float32. Run where torch and transformers are.

python make_beams.py FOLDER, where FOLDER holds SmolLM2-135M-Instruct with its float32 weights in safetensors.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import torch
import transformers

HERE = pathlib.Path(__file__).parent
END_ID = 2
SEARCHES: tuple[tuple[int, float, Any, int], ...] = ((4, 1.0, False, 24), (3, 0.0, "never", 16), (4, 2.0, True, 20))


def main(folder: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = json.loads((HERE / "smollm2_greedy.json").read_text())["prompts"]
    cases = []
    for prompt in sorted(prompts, key=lambda prompt: len(prompt["prompt_token_ids"]))[:3]:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        for width, length_penalty, early_stopping, max_tokens in SEARCHES:
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=max_tokens,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=END_ID,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            sequences = []
            for line, score in zip(found.sequences, found.sequences_scores, strict=True):
                tokens = line[ids.shape[1] :].tolist()
                end = tokens.index(END_ID) + 1 if END_ID in tokens else None
                sequences.append({"token_ids": tokens[:end], "score": float(score)})
            case = {"prompt": prompt["name"], "width": width, "length_penalty": length_penalty}
            cases.append(case | {"early_stopping": early_stopping, "max_tokens": max_tokens, "sequences": sequences})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    (HERE / "smollm2_beam.json").write_text(json.dumps(versions | {"cases": cases}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
