"""Which plugins are installed, what do they claim, and what is on this machine?"""
