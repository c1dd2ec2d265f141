"""Take the JSON Schema test suite through llguidance, as tests/test_schema_suites.py does through ours: what each one refuses or lets pass.

pip install llguidance; python bench/schemas.py

Downloads the suite. The table beside it: python -m pytest -m nightly -s tests/test_schema_suites.py
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer  # type: ignore[import-not-found, unused-ignore]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import suites
from test_schema_suites import LONGEST, OLDER


def main() -> None:
    """Print the counts."""
    tokenizer, n, silent = LLTokenizer("byte"), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for group in suites.test_suite(Path(folder)):
            if group.name in OLDER or "/optional/content.json" in group.name:
                continue
            n["schemas"] += 1
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(group.schema))
            refused, warnings = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
            if refused:
                n["refused"] += 1
                continue
            n["loosened"] += bool(warnings)
            for value, is_valid in group.values:
                written = [json.dumps(value, ensure_ascii=False, separators=(",", more)) for more in (":", ": ")]
                if len(written[0]) > LONGEST:
                    continue
                taken = any(_takes(LLMatcher(tokenizer, grammar), text) for text in written)
                n[f"{'valid' if is_valid else 'invalid'}, {'taken' if taken else 'not taken'}"] += 1
                if taken and not is_valid and not warnings:
                    silent[group.name.partition(":")[0]] += 1
    print(dict(n), f"silent: {silent.total()}", silent.most_common(15), sep="\n")


def _takes(matcher: LLMatcher, text: str) -> bool:
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


if __name__ == "__main__":
    main()
