"""apply_moves.py MOVESFILE...: rewrite imports (and renamed identifiers) in nbs, tests, scripts of the cwd."""
import re, sys, io, tokenize, collections
from pathlib import Path
import nbformat
MOVES = {}
for f in sys.argv[1:]:
    for l in Path(f).read_text().split('\n'):
        l = l.split('#')[0].strip()
        if '->' not in l: continue
        a, b = (x.strip().removeprefix('compvl.') for x in l.split('->'))
        MOVES[tuple(a.rsplit('.', 1))] = tuple(b.rsplit('.', 1)) if '.' in b else None
IMPORT = re.compile(r'^(?P<i>[ \t]*)from compvl\.(?P<m>[\w.]+) import (?P<n>\((?:[^()]|\n)*?\)|[^\n#(]*)(?P<c>[^\n]*)$', re.M)
def rename(src, mapping):
    if not mapping: return src
    try: toks = list(tokenize.generate_tokens(io.StringIO(src).readline))
    except (tokenize.TokenError, IndentationError): return src
    lines = src.splitlines(keepends=True); edits = []; depth = 0
    for i, t in enumerate(toks):
        if t.type == tokenize.OP and t.string in '([{': depth += 1
        if t.type == tokenize.OP and t.string in ')]}': depth -= 1
        if t.type == tokenize.NAME and t.string in mapping:
            if i and toks[i-1].string == '.': continue
            if depth and toks[i+1].string == '=': continue
            edits.append((t.start, t.end, mapping[t.string]))
        elif t.type == tokenize.STRING and t.start[0] == t.end[0] and re.match(r'[rR]?[fF]', t.string):
            new = re.sub(r'\{[^{}]*\}', lambda m: re.sub(r'(?<![\w.\'"])(' + '|'.join(map(re.escape, mapping)) + r')\b', lambda k: mapping[k[1]], m[0]), t.string)
            if new != t.string: edits.append((t.start, t.end, new))
    for (r, c), (_, e), s in reversed(edits):
        l = lines[r-1]; lines[r-1] = l[:c] + s + l[e:]
    return ''.join(lines)
def fix(src):
    mapping = {}
    def sub(m):
        names = [n.strip() for n in re.sub(r'#[^\n]*', '', m['n']).strip('() \n').replace('\n', ' ').split(',') if n.strip()]
        if not any((m['m'], n.split(' as ')[0]) in MOVES for n in names): return m[0]
        by = collections.OrderedDict()
        for n in names:
            base, _, alias = n.partition(' as ')
            to = MOVES.get((m['m'], base), (m['m'], base))
            if to is None: print('REMOVED', m['m'], base); continue
            if to[1] != base and not alias: mapping[base] = to[1]
            by.setdefault(to[0], []).append(to[1] + (f' as {alias}' if alias else ''))
        return '\n'.join(f"{m['i']}from compvl.{k} import {', '.join(sorted(v))}" for k, v in by.items()) + m['c']
    out = IMPORT.sub(sub, src)
    for (om, on), to in MOVES.items():
        if to: out = re.sub(rf'compvl\.{re.escape(om)}\.{re.escape(on)}\b', f'compvl.{to[0]}.{to[1]}', out)
    return out, mapping
def do(src, extra=None):
    out, mp = fix(src)
    return rename(out, {**(extra or {}), **mp}), mp
changed = 0
for f in sorted(Path('nbs').rglob('*.ipynb')):
    nb = nbformat.read(f, 4); mapping = {}
    for c in nb.cells:
        if c.cell_type == 'code': mapping.update(fix(c.source)[1])
    before = [c.source for c in nb.cells]
    for c in nb.cells: c.source = do(c.source, mapping)[0] if c.cell_type == 'code' else fix(c.source)[0]
    if before != [c.source for c in nb.cells]: nbformat.write(nb, f); changed += 1
for f in [*Path('nbs').rglob('*.py'), *Path('tests').glob('*.py'), *Path('scripts').glob('*.py')]:
    s = f.read_text('utf-8'); out = do(s)[0]
    if out != s: f.write_text(out, encoding='utf-8'); changed += 1
print(changed, 'files changed,', len(MOVES), 'moves')
