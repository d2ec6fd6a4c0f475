"""What the models of these tests are asked and say."""

from typing import Literal

from pydantic import BaseModel


def call(name, **arguments):
    """A call as the model writes it."""
    lines = [
        f'<｜DSML｜parameter name="{key}" string="true">{text}</｜DSML｜parameter>' for key, text in arguments.items()
    ]
    invoke = "\n".join([f'<｜DSML｜invoke name="{name}">', *lines, "</｜DSML｜invoke>"])
    return f"\n\n<｜DSML｜tool_calls>\n{invoke}\n</｜DSML｜tool_calls>"


CALL = "Let me look." + call("get_weather", city="Oslo")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}}
THOUGHTFUL_CALL = "hm</think>" + CALL


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]  # a model of random weights would not end a free text
