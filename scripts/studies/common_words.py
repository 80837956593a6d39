"""Common short words, of which the names in made lists consist; most are one token for most tokenizers."""

_WORDS = """
apple arrow autumn badge baker basket beach bell bird boat book bottle branch bread bridge brush bucket button
cabin cable candle canoe carpet castle cattle chain chair chalk cheese cherry church circle clock cloud coat coffee
copper corn cotton cradle cream crown curtain dance desert diamond dinner doctor dragon drum eagle engine fabric
farmer feather fence field finger fire flag flower forest fountain fruit garden garlic gate ghost glass glove
gold grain grape grass guitar hammer harbor hat hill honey horse hotel house insect iron island jacket jewel
kettle key king kitchen kite knife ladder lake lamp leaf leather lemon letter lion lock machine map marble
market meadow milk mirror money monkey moon mother motor mountain mouse music nail needle nest night ocean
office olive onion orange oven owl paint palace paper park path peach pearl pencil pepper piano picture pillow
pilot planet plate pocket poem potato powder prince queen rabbit radio rain ribbon rice ring river road rock
roof room rope rose salt sand school screen seed shadow sheep shell ship shoe silver sister skirt snow soap
soldier song spider spoon spring square stable star station steam stone storm street sugar summer table tail
teacher temple thread tiger tower town train tree tunnel valley village violin wagon wall watch water weather
wheel window winter wire wolf wood wool
"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())
