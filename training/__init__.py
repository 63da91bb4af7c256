"""How the embedded model was made: the text it learned from, its twin in plain torch, and the programs that train and export it."""
