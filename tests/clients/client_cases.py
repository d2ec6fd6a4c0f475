"""What the models of these tests are asked and say."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

CALL = (
    "Let me look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n"
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}}
THOUGHTFUL_CALL = "hm</think>" + CALL


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]  # a model of random weights would not end a free text
