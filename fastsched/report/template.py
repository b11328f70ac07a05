"""The HTML of report.html as one Jinja2 template: no scripts, no links to anything outside the file."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink: #111827; --soft: #6b7280; --line: #e5e7eb; --paper: #fff; --wash: #f6f7f9; --blue: #2563eb; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink); line-height: 1.5;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }
h1 { font-size: 1.75rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .8rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; color: var(--soft); font-weight: 600; }
p { margin: .3rem 0 .8rem; }
.sub, figcaption, .note { color: var(--soft); font-size: .88rem; }
nav { margin-top: .7rem; font-size: .88rem; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
a { color: var(--blue); text-decoration: none; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 215px), 1fr));
         gap: .8rem; margin-top: 1.6rem; }
.card, figure, .box { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: .8rem 1rem; }
.card b { display: block; font-size: 1.35rem; font-weight: 650; white-space: nowrap; }
.card span { color: var(--soft); font-size: .82rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .7rem .8rem .8rem; }
figure.wide { grid-column: 1 / -1; }
figure img { width: 100%; height: auto; display: block; }
figcaption { padding: .3rem .4rem 0; }
.box { overflow-x: auto; padding: .2rem .4rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; font-weight: 600; color: var(--soft); white-space: nowrap; }
th, td { padding: .42rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
tr.mean td { background: #f0f5ff; font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.k, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .82rem; }
td.k { white-space: nowrap; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 11rem; overflow-y: auto;
      font: .82rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.tag { display: inline-block; border-radius: 99px; padding: 0 .55rem; font-size: .78rem; white-space: nowrap; }
.good { background: #d1fae5; color: #065f46; } .bad { background: #fee2e2; color: #991b1b; }
.cut { background: #fef3c7; color: #92400e; }
.up { color: #047857; } .down { color: #b91c1c; }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 3px; margin-right: .5rem; }
details summary { cursor: pointer; color: var(--blue); font-size: .9rem; margin: .6rem 0; }
.columns { columns: 2 420px; column-gap: 1rem; } .columns .box { break-inside: avoid; margin-bottom: 1rem; }
.columns td:first-child { width: 45%; }
</style>
</head>
<body><main>

{% macro table(t) %}
<div class="box"><table>
{% if t.head | select | list %}<tr>
{% for name in t.head %}<th{% if loop.index0 in t.numeric %} class="n"{% endif %}>{{ name }}</th>{% endfor %}
</tr>{% endif %}
{% for row in t.rows %}{% set colour = t.colours[loop.index0] if t.colours else "" %}
<tr{% if loop.index0 in t.strong %} class="mean"{% endif %}>
{%- for cell in row %}<td class="{% if loop.index0 in t.numeric %}n{% elif loop.index0 in t.code %}k{% endif %}">
{%- if loop.first and colour %}<span class="dot" style="background:{{ colour }}"></span>{% endif %}{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}</table></div>
{% endmacro %}

<h1>{{ title }}</h1>
<div class="sub">{{ subtitle }}</div>
<nav>{% for anchor, name in sections %}<a href="#{{ anchor }}">{{ name }}</a>{% endfor %}</nav>

{% if cards %}<div class="cards">
{% for value, label in cards %}<div class="card"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}
</div>{% endif %}

{% if comparison %}<h2 id="comparison">Comparison</h2>
<p class="note">{{ comparison_note }}</p>{{ table(comparison) }}{% endif %}

{% if accuracy %}<h2 id="accuracy">Held-out accuracy</h2>{{ table(accuracy) }}{% endif %}

<h2 id="plots">Plots</h2>
<div class="plots">
{% for plot, uri in plots %}<figure{% if plot.wide %} class="wide"{% endif %}>
<img src="{{ uri }}" alt="{{ plot.title }}"><figcaption>{{ plot.aid }}</figcaption></figure>
{% endfor %}</div>

{% if tokens %}<h2 id="tokens">Tokens by position</h2>
<p class="note">TP-Score: where in a response a token usually occurs, 0 at its beginning, 1 at its end.</p>{{ table(tokens) }}{% endif %}

{% if samples %}<h2 id="samples">Samples</h2>
<p class="note">What the model wrote at the first, the middle and the last recorded step{{ samples_of }}.</p>
{% for step, rows in samples %}<h3>Step {{ step }}</h3>
<div class="box"><table>
<tr><th style="width:40%">Prompt</th><th style="width:34%">Response</th>
<th>Answer</th><th class="n">Reward</th><th class="n">Tokens</th></tr>
{% for row in rows %}<tr><td><pre>{{ row.prompt }}</pre></td><td><pre>{{ row.response }}</pre>
{%- if row.finish_reason == "length" %}<span class="tag cut">cut by the token limit</span>{% endif %}</td>
<td><pre>{{ row.answer }}</pre></td>
<td class="n"><span class="tag {{ 'good' if row.success else 'bad' }}">{{ row.shown_reward }}</span></td>
<td class="n">{{ row.length }}</td></tr>
{% endfor %}</table></div>{% endfor %}{% endif %}

<h2 id="time">Time by phase</h2>{{ table(time) }}

{% if rules %}<h2 id="rules">Coefficient rules that fired</h2>{{ table(rules) }}{% endif %}

{% if config %}<h2 id="config">Configuration</h2>
{% if differences %}<p class="note">What differs between the runs; below it, all of the first run.</p>
{{ table(differences) }}<p></p>{% endif %}
<div class="columns">{% for part in config %}{{ table(part) }}{% endfor %}</div>{% endif %}

{% if environment %}<h2 id="environment">Environment</h2>{{ table(environment) }}{% endif %}

<h2 id="glossary">Columns of metrics.csv</h2>
<details><summary>What each column means</summary>{{ table(glossary) }}</details>
</main></body></html>
"""
