"""What is one step of a layer: its inputs, its right answer, its cost?"""
