"""Prints queries with their best titles, and says where the true title is among the hits.

python show_answers.py QUERIES.tsv ANSWERS.jsonl
"""

import json
import sys
from pathlib import Path

SHOWN_QUERIES, SHOWN_HITS = 5, 3


def main(queries_path: str, answers_path: str) -> None:
    queries = [line.split("\t") for line in Path(queries_path).read_text("utf-8").splitlines()]
    answers = [json.loads(line)["hits"] for line in Path(answers_path).read_text("utf-8").splitlines()]
    found = 0
    for number, ((query, title), hits) in enumerate(zip(queries, answers, strict=True)):
        texts = [hit["text"] for hit in hits]
        rank = texts.index(title) + 1 if title in texts else 0
        found += rank > 0
        if number >= SHOWN_QUERIES:
            continue
        print(f"\n{query!r}, meaning {title!r}: " + (f"rank {rank}" if rank else "not among the hits"))
        for hit in hits[:SHOWN_HITS]:
            print(f"  {hit['normalised_score']:8.3f}  {hit['text']}")
    print(f"\nThe true title is among the hits of {found} of {len(queries)} queries.")


if __name__ == "__main__":
    main(*sys.argv[1:])
