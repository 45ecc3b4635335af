"""usage: from ed import sub; sub(path, [(old,new[,count])...])"""
from pathlib import Path
def sub(path, *pairs):
    p=Path(path); s=p.read_text()
    for pair in pairs:
        old,new=pair[0],pair[1]; n=pair[2] if len(pair)>2 else 1
        c=s.count(old)
        assert c==n, (path, c, old)
        s=s.replace(old,new)
    p.write_text(s)
