"""Chat messages to prompt text, through the checkpoint's own Jinja template."""

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from deepinfer_lab.errors import ChatError


def render(
    template: str,
    messages: list[dict[str, str]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """Render `messages` ([{"role": ..., "content": ...}, ...]) with a chat template of Hugging Face's dialect.

    The template comes with the checkpoint, so it runs in Jinja's immutable sandbox.

    Raises:
        ChatError: the template does not parse, or refuses these messages.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, bos_token=bos_token, eos_token=eos_token
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise ChatError(f"the chat template does not accept these messages: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)
