"""What `drafts` may be: "auto", "off", or a number; what it needs of the cache, and who decides then.
No torch."""

from dataclasses import replace
from typing import Literal

from dsv4.config import EngineConfig, ModelConfig, is_size, shown
from dsv4.engine.draft.counts import ChosenDrafts, FixedDrafts
from dsv4.request import RequestError

Drafts = int | Literal["auto", "off"]


def check_drafts(drafts: Drafts, config: ModelConfig, *, numerics: str) -> Drafts:
    """`drafts` as it will be: "auto" is "off" where nothing can draft. `RequestError` for a number that cannot be."""
    if drafts == "off" or drafts == 0:
        return "off"
    obstacle = why_off(config, numerics=numerics)
    if drafts == "auto":
        return "auto" if obstacle is None else "off"
    if not is_size(drafts):
        raise RequestError(f"drafts must be 'auto', 'off' or a number of tokens, found {shown(drafts)}")
    if obstacle is not None:
        raise RequestError(f"drafts is {drafts}, but {obstacle}; use drafts='off'")
    if int(drafts) > config.max_drafts:
        kind = "MTP block" if config.dspark is None else "DSpark head"
        raise RequestError(f"drafts must be at most {config.max_drafts} with this model's {kind}, found {drafts}")
    return drafts


def why_off(config: ModelConfig, *, numerics: str) -> str | None:
    """Why there can be no drafts; None if there can."""
    if not config.max_drafts:
        return "this model has no drafter"
    if numerics != "official":
        return "in exact numerics equal index scores are told apart by how many tokens are fed at once"
    return None


def draft_limits(limits: EngineConfig, config: ModelConfig, drafts: Drafts) -> EngineConfig:
    """The limits with room for that many drafts in the rings."""
    wanted = 0 if drafts == "off" else config.max_drafts if drafts == "auto" else int(drafts)
    return limits if limits.max_draft_tokens >= wanted else replace(limits, max_draft_tokens=wanted)


def make_choice(config: ModelConfig, drafts: Drafts) -> FixedDrafts | None:
    """Who decides how many drafts a step has; None where there are none."""
    if drafts == "off":
        return None
    if drafts == "auto":
        return ChosenDrafts(config.max_drafts, is_block=config.dspark is not None)
    return FixedDrafts(int(drafts))
