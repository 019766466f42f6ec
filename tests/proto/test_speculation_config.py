"""What --speculative-config and vLLM's older flags may say, and in which words they are refused."""

from __future__ import annotations

import json

import pytest

from quire.proto.config import ConfigError, EngineArgs, parse_service_args
from quire.proto.speculation import SpeculativeConfig, speculative_config


def config_of(**flags: object) -> SpeculativeConfig | None:
    return speculative_config(EngineArgs(**flags).check())  # type: ignore[arg-type]


def test_without_flags_there_is_none() -> None:
    assert config_of() is None
    assert not [flag for flag in EngineArgs().check().argv_for("gpu_worker") if "spec" in flag]


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'},
        {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 3, "ngram_prompt_lookup_max": 4},
    ],
)
def test_the_same_in_all_spellings(flags: dict[str, object]) -> None:
    config = config_of(**flags)
    assert config is not None
    assert (config.method, config.drafts, config.prompt_lookup_min, config.prompt_lookup_max) == ("ngram", 3, 4, 4)
    assert config.draft_rows(8) == 8


def test_a_worker_is_given_one_flag() -> None:
    args = EngineArgs(
        speculative_model="[ngram]", num_speculative_tokens=2, speculative_disable_by_batch_size=5
    ).check()
    argv = [flag for flag in args.argv_for("gpu_worker") if "spec" in flag]
    assert [flag.partition("=")[0] for flag in argv] == ["--speculative-config"]
    again = speculative_config(parse_service_args("gpu_worker", argv))
    assert again == speculative_config(args)
    assert again is not None and again.draft_rows(8) == 4


def test_a_suffix_tree_is_as_long_as_it_is_deep() -> None:
    config = config_of(speculative_config='{"method": "suffix"}')
    assert config is not None and config.drafts == 24


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be a JSON object, got [1]."),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens was provided but without speculative model."),
        ({"method": "ngram"}, "num_speculative_tokens must be provided with speculative model unless"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "Expected num_speculative_tokens to be greater than zero (0), and 64 at most.",
        ),
        ({"method": "ngram", "num_speculative_tokens": 65}, "greater than zero (65), and 64 at most."),
        ({"method": "ngram", "num_speculative_tokens": "x"}, "Expected `int | null`, got `str`"),
        ({"method": "ngram", "num_speculative_tokens": 2, "depth": 4}, "unknown field `depth`"),
        ({"method": "magic", "num_speculative_tokens": 2}, "unknown method 'magic'. Must be one of ["),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 0}, "prompt_lookup_min=0 must be > 0"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 0}, "prompt_lookup_min=0 must be > 0"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min=5 must be <= prompt_lookup_max=3",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "disable_by_batch_size": 1},
            "Expect the batch size threshold of disabling speculative decoding is > 1, but got "
            "speculative_disable_by_batch_size=1",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 3},
            "draft_tensor_parallel_size=3 cannot be other than 1 or target model tensor_parallel_size",
        ),
        ({"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "block"}, "would change outputs"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob=2.0 must be in"),
    ],
)
def test_what_is_refused(given: object, words: str) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(ConfigError) as error:
        EngineArgs(speculative_config=text).check()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_speculative_tokens": 3}, "num_speculative_tokens was provided but without speculative model."),
        ({"ngram_prompt_lookup_max": 3}, "ngram_prompt_lookup_max says nothing without speculative_model"),
        ({"spec_decoding_acceptance_method": "typical_acceptance_sampler"}, "would change outputs"),
        (
            {"speculative_config": '{"method": "ngram"}', "speculative_model": "[ngram]"},
            "speculative_config and speculative_model say the same",
        ),
        (
            {"speculative_model": "[ngram]", "num_speculative_tokens": 2, "pipeline_parallel_size": 2},
            "a model in stages does not speculate",
        ),
    ],
)
def test_what_flags_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**flags).check()  # type: ignore[arg-type]
