"""Published parameter counts of models with experts, total and active, to the digit."""

from __future__ import annotations

import pytest

from triaxis.models.presets import PRESETS

PUBLISHED = {
    # total; active with embedding and head, without the input embedding, without both
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248, 12_748_853_248, 12_617_781_248),
    "mixtral-8x22b": (140_630_071_296, 39_161_468_928, 38_960_142_336, 38_758_815_744),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704, 3_041_867_776, 2_730_702_848),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520, 21_568_433_664, 20_946_103_808),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208, 2_451_435_008, 2_241_719_808),
    "deepseek-v2": (235_741_434_880, 21_375_800_320, 20_851_512_320, 20_327_224_320),
    "deepseek-v3": (671_026_419_200, 37_552_297_472, 36_625_618_432, 35_698_939_392),
    "671b": (671_026_419_200, 37_552_297_472, 36_625_618_432, 35_698_939_392),
    "kimi-k2": (1_026_408_232_448, 32_861_500_928, 31_687_095_808, 30_512_690_688),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    model = PRESETS[name]
    total, active, without_embedding, without_both = PUBLISHED[name]
    assert model.parameters() == total
    assert model.active_parameters() == active
    assert active - model.embedding_parameters() == without_embedding
    assert active - 2 * model.embedding_parameters() == without_both


def test_a_dense_model_is_all_active() -> None:
    model = PRESETS["llama3-8b"]
    assert model.active_parameters() == model.parameters() and not model.experts()
