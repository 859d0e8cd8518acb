"""Chat templates in Jinja, rendered as by Hugging Face's libraries: in a sandbox, with the same
names."""

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
    """Renders only the contents of `{% generation %}`, which marks answers for training."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render(
    template: str, messages: Sequence[Mapping[str, str]], names: Mapping[str, str | None]
) -> str:
    """Returns the text of a conversation, up to where the model's answer begins.

    `messages` have a role and a content each, both strings. `names` are other variables, such as `bos_token`.

    Raises:
      UserError: `messages` is not a list of messages, or the template fails or rejects them.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise UserError(
            f"messages are {messages!r:.60}; give a list, such as "
            "[{'role': 'user', 'content': 'Why?'}]"
        )
    for index, message in enumerate(messages):
        for field in ("role", "content"):
            if not isinstance(value := message.get(field), str):  # A template would print its repr.
                raise UserError(
                    f"messages[{index}][{field!r}]={value!r:.60}: must be a string; give text"
                )
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    sandbox.filters["tojson"] = _to_json
    variables = {"add_generation_prompt": True, "tools": None, "documents": None, **names}
    try:
        return sandbox.from_string(template).render(messages=messages, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the model's chat template cannot be read ({error}); decode without chat"
        ) from error
    except Exception as error:  # A template is a program and may raise anything.
        raise UserError(
            f"the model's chat template refuses these messages ({error}); change them"
        ) from error


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Replaces Jinja's own filter, which escapes `<` and others for web pages."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
