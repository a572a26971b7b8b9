"""What no linter says:  style.py FILE.py...   (exported modules or tests)"""
import ast, sys
def code_lines(node, lines):
    start = node.body[0].end_lineno if (isinstance(node.body[0], ast.Expr) and isinstance(getattr(node.body[0], 'value', None), ast.Constant) and isinstance(node.body[0].value.value, str)) else node.body[0].lineno - 1
    return sum(1 for l in lines[start:node.end_lineno] if l.strip() and not l.strip().startswith('#'))
total = 0; nodes = 0; nlines = 0
for f in sys.argv[1:]:
    src = open(f).read(); t = ast.parse(src); lines = src.split('\n')
    nlines += sum(1 for l in lines if l.strip()); nodes += sum(1 for _ in ast.walk(t))
    public = [n for n in ast.walk(t) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_')]
    def say(n, what):
        global total; total += 1; print(f"{f}:{n.lineno}: {what}")
    for n in ast.walk(t):
        if isinstance(n, ast.IfExp) and any(isinstance(x, ast.IfExp) for x in (n.body, n.orelse)): say(n, 'chained conditional expression')
        if isinstance(n, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)) and len(n.generators) > 1: say(n, 'comprehension with several fors')
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple):
            a = {ast.unparse(x) for x in n.targets[0].elts}; b = {ast.unparse(x) for x in n.value.elts}
            if a != b: say(n, 'tuple assignment that saves lines')
        if isinstance(n, ast.FunctionDef):
            k = code_lines(n, lines)
            if k > 40 and not any('longer than 40 lines:' in l.lower() for l in lines[n.lineno-1:n.end_lineno]): say(n, f'{n.name} has {k} lines')
        if isinstance(n, ast.NamedExpr): pass
    for n in t.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_') and not ast.get_docstring(n): say(n, f'{n.name} has no docstring')
    for i, l in enumerate(lines, 1):
        if len(l) > 100 and not l.startswith(('__all__', '           \'', '# %%')): print(f'{f}:{i}: {len(l)} columns'); total += 1
print(total, 'findings;', f'{nodes/max(nlines,1):.1f} syntax nodes a line, {nodes} nodes')
