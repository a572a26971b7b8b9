import ast,glob,os,collections,sys
mods={}
for f in glob.glob('compvl/**/*.py',recursive=True):
    if '_modidx' in f: continue
    m=f[:-3].replace('/','.').removesuffix('.__init__'); mods[m]=ast.parse(open(f).read())
edges=collections.defaultdict(set); priv=[]
def resolve(m,n,ispkg):
    base=m.split('.'); 
    if not ispkg: base=base[:-1]
    base=base[:len(base)-(n.level-1)] if n.level else []
    return '.'.join(base+([n.module] if n.module else []))
for m,t in mods.items():
    ispkg=os.path.isdir(m.replace('.','/'))
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom):
            tgt=resolve(m,n,ispkg) if n.level else (n.module or '')
            if not tgt.startswith('compvl'): continue
            for a in n.names:
                full=tgt+'.'+a.name
                if full in mods: edges[m].add(full)
                else:
                    edges[m].add(tgt)
                    if a.name.startswith('_'): priv.append((m,full))
                    if tgt in mods and not any(a.name==x for x in dir_names.get(tgt,[a.name])) if 'dir_names' in globals() else False: pass
print('PRIVATE:'); 
for p in sorted(priv): print('  ',*p)
# cycles at top-level
top=collections.defaultdict(set)
for m,t in mods.items():
    ispkg=os.path.isdir(m.replace('.','/'))
    for n in t.body:
        if isinstance(n,ast.ImportFrom) and n.level:
            tgt=resolve(m,n,ispkg)
            for a in n.names: top[m].add(tgt+'.'+a.name if tgt+'.'+a.name in mods else tgt)
state={}; cyc=[]
def dfs(m,path):
    state[m]=1
    for k in top[m]:
        if state.get(k)==1: cyc.append(path[path.index(k):]+[k] if k in path else [m,k])
        elif k not in state: dfs(k,path+[k])
    state[m]=2
for m in list(mods): 
    if m not in state: dfs(m,[m])
print('CYCLES:'); [print('  ',c) for c in cyc]
rank={r:i for i,r in enumerate([('core',),('images','stats','downloads','losses'),('metrics',),('text',),('microworld',),('models',),('attribution',),('data',),('benchmarks',),('evaluate','train'),('paper',),('app',)])}
R={x:i for k,i in rank.items() for x in k}
print('UPWARD:')
for m,ks in edges.items():
    for k in ks:
        a,b=(m.split('.')+['',''])[1],(k.split('.')+['',''])[1]
        if a in R and b in R and R[b]>R[a] or (a!=b and R.get(a)==R.get(b) and a in('evaluate','train')): print('  ',m,'->',k)
