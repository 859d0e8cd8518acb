"""Chat templates, which are in Jinja, as Hugging Face's libraries render them: in a sandbox, with
the same names."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from spectr_jax.utils.errors import UserError


class Generation(jinja2.ext.Extension):
    """`{% generation %}` around what the model says, which training marks; here its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render(
    template: str, messages: Sequence[Mapping[str, str]], names: Mapping[str, str | None]
) -> str:
    """Returns the text of a conversation, up to where the model's answer begins.

    Args:
      template: in Jinja.
      messages: with roles and contents.
      names: other variables, such as `bos_token`.

    Raises:
      UserError: the template refuses the messages, or fails; or they are no list of messages.
    """
    if isinstance(messages, str | Mapping) or not all(
        isinstance(each, Mapping) and "role" in each for each in messages
    ):
        raise UserError(
            f"messages are {messages!r:.60}; give a list, such as "
            f"[{{'role': 'user', 'content': 'Why?'}}]"
        )
    house = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    house.globals["raise_exception"] = _refuse
    house.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    house.filters["tojson"] = _to_json
    try:
        given = {
            "messages": messages,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **names,
        }
        return house.from_string(template).render(given)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the model's chat template cannot be read ({error}); decode without chat"
        ) from error
    except Exception as error:  # It is a program, of the model's makers.
        raise UserError(
            f"the model's chat template refuses these messages ({error}); change them"
        ) from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own writes `<` and others for web pages."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
