"""Edit notebooks as text.
  nb.py text NB...        NB.ipynb -> NB.py beside it (percent format; the .py is ignored by git)
  nb.py build [NB.py...]  every NB.py under nbs/ -> NB.ipynb (cells that did not change keep id and output), ruff format, export to compvl/
  nb.py run NB...         execute NB.ipynb with its outputs kept in it (a fresh kernel, in the repository root); prints the first error
  nb.py test NB...        execute without keeping outputs
Give notebooks as paths below nbs/ (.ipynb or .py both work).
"""
import hashlib, os, subprocess, sys
from pathlib import Path
import nbformat
from nbformat.v4 import new_notebook, new_code_cell, new_markdown_cell
ROOT = Path.cwd(); BIN = Path(sys.executable).parent
META = {'kernelspec': {'display_name': 'python3', 'language': 'python', 'name': 'python3'}}
def ip(p): return Path(p).with_suffix('.ipynb')
def text(path):
    nb = nbformat.read(ip(path), 4); out = []
    for c in nb.cells:
        tags = c.metadata.get('tags')
        if c.cell_type == 'code': out.append('# %%' + (f" tags={','.join(tags)}" if tags else '') + '\n' + c.source)
        else: out.append('# %% [markdown]\n' + '\n'.join('# ' + l if l else '#' for l in c.source.split('\n')))
    ip(path).with_suffix('.py').write_text('\n\n'.join(out) + '\n', encoding='utf-8')
    print(ip(path).with_suffix('.py'))
def parse(s):
    cells = []; cur = None
    for l in s.split('\n'):
        if l.startswith('# %%'):
            cur = [l, []]; cells.append(cur)
        elif cur is not None: cur[1].append(l)
    for head, lines in cells:
        body = '\n'.join(lines).strip('\n')
        if '[markdown]' in head:
            yield 'markdown', None, '\n'.join(l[2:] if l.startswith('# ') else l[1:] if l.startswith('#') else l for l in body.split('\n'))
        else:
            tags = head.split('tags=')[1].strip().split(',') if 'tags=' in head else None
            yield 'code', tags, body
def fmt(nb):
    "ruff format of every code cell of a notebook file"
def build(py):
    py = Path(py); f = py.with_suffix('.ipynb'); old = nbformat.read(f, 4) if f.exists() else new_notebook(cells=[], metadata=META)
    by = {}
    for c in old.cells: by.setdefault((c.cell_type, c.source.strip()), []).append(c)
    cells = []; used = set()
    for kind, tags, src in parse(py.read_text('utf-8')):
        if not src.strip(): continue
        found = by.get((kind, src.strip()))
        if found: c = found.pop(0)
        else:
            c = new_code_cell(src) if kind == 'code' else new_markdown_cell(src)
            c['id'] = hashlib.sha1(src.encode()).hexdigest()[:8]
        if tags: c.metadata['tags'] = tags
        k = 0; base = c['id']
        while c['id'] in used: k += 1; c['id'] = hashlib.sha1(f'{base}{k}'.encode()).hexdigest()[:8]
        used.add(c['id']); cells.append(c)
    nb = new_notebook(cells=cells, metadata=old.metadata or META); nb.nbformat, nb.nbformat_minor = 4, 5
    nbformat.write(nb, f)
def main(cmd, *args):
    if cmd == 'text': [text(a) for a in args]
    if cmd == 'build':
        files = [Path(a).with_suffix('.py') for a in args] or sorted((ROOT/'nbs').rglob('*.py'))
        for f in files: build(f)
        nbs = [str(f.with_suffix('.ipynb')) for f in files]
        subprocess.run([BIN/'ruff', 'format', '-q', *nbs])
        for n in nbs: text(n) if Path(n).with_suffix('.py').exists() else None
        r = subprocess.run([BIN/'ruff', 'check', '--fix', '-q', '--output-format', 'concise', *nbs])
        for n in nbs: text(n) if Path(n).with_suffix('.py').exists() else None
        for n in nbs: subprocess.run([BIN/'nbdev_clean', '--fname', n])
        subprocess.run([BIN/'nbdev_export'])
    if cmd in ('run', 'test'):
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
        bad = 0
        for a in args:
            f = ip(a); nb = nbformat.read(f, 4)
            env = dict(os.environ); os.environ['PYTHONPATH'] = str(ROOT); os.environ.setdefault('OMP_NUM_THREADS', '1'); os.environ['IN_TEST'] = '1' if cmd == 'test' else ''
            if cmd == 'run': os.environ.pop('IN_TEST', None)
            c = NotebookClient(nb, timeout=900, kernel_name='python3', resources={'metadata': {'path': str(ROOT)}})
            try: c.execute(); print('ok', f)
            except CellExecutionError as e: bad = 1; print('FAILED', f, '\n', str(e)[-3500:])
            else:
                if cmd == 'run':
                    nbformat.write(nb, f); subprocess.run([BIN/'nbdev_clean', '--fname', str(f)])
        sys.exit(bad)
if __name__ == '__main__': main(*sys.argv[1:]) if len(sys.argv) > 1 else print(__doc__)
