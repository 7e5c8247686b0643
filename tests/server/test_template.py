"""A chat template gives what the model library gives, and can do nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from piecework.errors import ModelError
from piecework.server.faults import Refusal
from piecework.server.template import read_template

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "[system] " + system + "\\n" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {{- '[' + message['role'] + '] ' + (message | tojson) + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}{{ tools is none }}{{ enable_thinking | default('unset') }}"
)
TALKS = [
    [{"role": "user", "content": "Größe <b>&'\" \n"}],
    [{"role": "system", "content": " s "}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
]


@pytest.mark.parametrize("template", [SMOLLM, LLAMA, GENERATION])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_it_renders_as_transformers_does(tmp_path: Path, template: str, talk: list[dict[str, str]], place: str) -> None:
    special = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>"}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    config = {"config": template, "named": [{"name": "default", "template": template}]}.get(place)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": config}))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), bos_token="<s>", eos_token="</s>"
    )
    ours = read_template(tmp_path)
    assert ours is not None
    for add in (True, False):
        wanted = theirs.apply_chat_template(talk, chat_template=template, add_generation_prompt=add, tokenize=False)
        assert ours.render(talk, add_generation_prompt=add) == wanted


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "access to attribute"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{% for a in range(100000000) %}{% endfor %}", "Range too big"),
        ("{{ messages[0].role + 1 }}", "can only concatenate str"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% include 'other' %}", "no loader for this environment"),
    ],
)
def test_it_stays_in_its_sandbox(tmp_path: Path, template: str, said: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    found = read_template(tmp_path)
    assert found is not None
    with pytest.raises(Refusal, match=said) as caught:
        found.render(TALKS[0])
    assert (caught.value.status, caught.value.code) == (400, "chat_template")


def test_no_template_a_broken_one_and_another(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("line one\n{% if %}")
    with pytest.raises(ModelError, match=r"the chat template in `chat_template.jinja` cannot be read: line 2"):
        read_template(tmp_path)
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}!")
    found = read_template(tmp_path, other)
    assert found is not None and found.render([{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(ModelError, match="cannot be read"):
        read_template(tmp_path, tmp_path / "none")
