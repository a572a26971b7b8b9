"""Not applied, not run. In a checkout of branch house-evaluate: write the notebooks as text (nb.py text), run this there, build."""
def sub(f, a, b):
    p = 'nbs/lib/evaluate/' + f; s = open(p).read(); assert a in s, (f, a); open(p, 'w').write(s.replace(a, b))
sub('02_store.py', '        keys, blocks = [], []\n', '        keys = []\n        blocks = []\n')
sub('07_tasks.py', '        s_c, s_foils = scores[:n], scores[n:]\n', '        s_c = scores[:n]\n        s_foils = scores[n:]\n')
sub('07_tasks.py', '        images, captions, owner, caption_ids = [], [], [], []\n', '        images = []\n        captions = []\n        owner = []\n        caption_ids = []\n')
sub('10_engine.py', '    outcomes, tables = {}, []\n', '    outcomes = {}\n    tables = []\n')
sub('10_engine.py', '    Raises CompvlError where there are others and `skip_damaged` is False, or where all are damaged."""', '    Raises CompvlError for others without `skip_damaged`, and where no item is readable."""')
sub('11_comparisons.py', '    a, b = aligned.outcomes_a[metric], aligned.outcomes_b[metric]\n', '    a = aligned.outcomes_a[metric]\n    b = aligned.outcomes_b[metric]\n')
sub('11_comparisons.py', 'over parts that weigh the same; `joint`', 'over parts of the same weight; `joint`')
sub('11_comparisons.py', 'ids are in one table only{example}; "\n            "evaluate', 'ids are in one table only"\n            f"{example}; evaluate')
sub('12_failures.py', '    texts, images = {}, {}\n', '    texts = {}\n    images = {}\n')
sub('12_failures.py', 'with their scores, one row an item or query, in the order of `scores`.', 'with their scores: one row an item or query, ordered as `scores`.')
