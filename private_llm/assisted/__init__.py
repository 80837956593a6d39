"""Products with public weights on masked inputs: numbers, masks and the client's check. Layers know no model.

A client holds x and wants W x; W is public, x nobody else's. It draws a mask r of ring elements and sends x - r to one
server, and the key of r to another. Each multiplies what it has by W; the two results add up to W x. Neither learns x:
one sees uniform elements, the other a key that was drawn without looking at x. Both together know x.
"""
