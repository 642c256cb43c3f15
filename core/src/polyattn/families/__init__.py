"""How does each kind of layer work: attention, MLA, recurrences?"""
