#!/bin/sh
# What `make demo` runs: an index of 200,000 titles, a look inside, a beam search over a model's proposals.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf '\n$ %s\n' "$*"; "$@"; }

say flashtrie build titles.txt.zst -o "$work/titles.ft" --tokenizer tokenizer.json.zst
say flashtrie inspect "$work/titles.ft"
say flashtrie search "$work/titles.ft" grids.npz --eos 50256 --format jsonl -o "$work/answers.jsonl"
printf '\nThe first queries, their best titles, and where the title they mean stands:\n'
python show_answers.py queries.tsv "$work/answers.jsonl"
