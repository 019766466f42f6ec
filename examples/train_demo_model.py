"""Train quire's demo model: a Llama of about two million parameters, from nothing, on two CPU cores.

Everything the model knows is written in this file: tables of plain facts, and templates that turn
them into documents and ChatML chats.  The script trains a byte-level BPE tokenizer on that corpus,
then the model, and saves an ordinary Hugging Face folder:

    python examples/train_demo_model.py --out demo_model            # about 25 minutes on two free cores
    python examples/train_demo_model.py --out /tmp/m --minutes 3    # a quick look
    python examples/train_demo_model.py --show 20                   # print some of the corpus

The corpus depends on --seed alone, and the same seed, steps and threads give the same model.  On a
slow or busy machine --minutes ends the training early; the learning rate follows the clock then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ---------------------------------------------------------------------------------------------
# Tables.  One fact a line, or pairs divided by commas; the parsers are just below the tables.
# ---------------------------------------------------------------------------------------------

COUNTRIES = {
    "Europe": """Albania:Tirana, Austria:Vienna, Belarus:Minsk, Belgium:Brussels, Bosnia and Herzegovina:Sarajevo,
        Bulgaria:Sofia, Croatia:Zagreb, the Czech Republic:Prague, Denmark:Copenhagen, Estonia:Tallinn, Finland:Helsinki,
        France:Paris, Germany:Berlin, Greece:Athens, Hungary:Budapest, Iceland:Reykjavik, Ireland:Dublin, Italy:Rome,
        Latvia:Riga, Lithuania:Vilnius, Luxembourg:Luxembourg City, Malta:Valletta, Moldova:Chisinau, Monaco:Monaco,
        Montenegro:Podgorica, the Netherlands:Amsterdam, North Macedonia:Skopje, Norway:Oslo, Poland:Warsaw,
        Portugal:Lisbon, Romania:Bucharest, Russia:Moscow, Serbia:Belgrade, Slovakia:Bratislava, Slovenia:Ljubljana,
        Spain:Madrid, Sweden:Stockholm, Switzerland:Bern, Ukraine:Kyiv, the United Kingdom:London, England:London,
        Scotland:Edinburgh, Wales:Cardiff""",
    "Asia": """Afghanistan:Kabul, Armenia:Yerevan, Azerbaijan:Baku, Bangladesh:Dhaka, Bhutan:Thimphu, Cambodia:Phnom Penh,
        China:Beijing, Cyprus:Nicosia, Georgia:Tbilisi, India:New Delhi, Indonesia:Jakarta, Iran:Tehran, Iraq:Baghdad,
        Israel:Jerusalem, Japan:Tokyo, Jordan:Amman, Kazakhstan:Astana, Kuwait:Kuwait City, Laos:Vientiane,
        Lebanon:Beirut, Malaysia:Kuala Lumpur, the Maldives:Male, Mongolia:Ulaanbaatar, Nepal:Kathmandu, Oman:Muscat,
        Pakistan:Islamabad, the Philippines:Manila, Qatar:Doha, Saudi Arabia:Riyadh, Singapore:Singapore,
        South Korea:Seoul, North Korea:Pyongyang, Syria:Damascus, Taiwan:Taipei, Thailand:Bangkok, Turkey:Ankara,
        the United Arab Emirates:Abu Dhabi, Uzbekistan:Tashkent, Vietnam:Hanoi, Yemen:Sanaa""",
    "Africa": """Algeria:Algiers, Angola:Luanda, Botswana:Gaborone, Cameroon:Yaounde, Chad:N'Djamena, Egypt:Cairo,
        Eritrea:Asmara, Ethiopia:Addis Ababa, Ghana:Accra, Guinea:Conakry, Kenya:Nairobi, Liberia:Monrovia,
        Libya:Tripoli, Madagascar:Antananarivo, Malawi:Lilongwe, Mali:Bamako, Morocco:Rabat, Mozambique:Maputo,
        Namibia:Windhoek, Niger:Niamey, Nigeria:Abuja, Rwanda:Kigali, Senegal:Dakar, Sierra Leone:Freetown,
        Somalia:Mogadishu, South Africa:Pretoria, Sudan:Khartoum, Tanzania:Dodoma, Tunisia:Tunis, Uganda:Kampala,
        Zambia:Lusaka, Zimbabwe:Harare""",
    "North America": """the Bahamas:Nassau, Barbados:Bridgetown, Canada:Ottawa, Costa Rica:San Jose, Cuba:Havana,
        the Dominican Republic:Santo Domingo, El Salvador:San Salvador, Guatemala:Guatemala City, Haiti:Port-au-Prince,
        Honduras:Tegucigalpa, Jamaica:Kingston, Mexico:Mexico City, Nicaragua:Managua, Panama:Panama City,
        the United States:Washington""",
    "South America": """Argentina:Buenos Aires, Bolivia:Sucre, Brazil:Brasilia, Chile:Santiago, Colombia:Bogota,
        Ecuador:Quito, Guyana:Georgetown, Paraguay:Asuncion, Peru:Lima, Suriname:Paramaribo, Uruguay:Montevideo,
        Venezuela:Caracas""",
    "Oceania": "Australia:Canberra, Fiji:Suva, New Zealand:Wellington, Papua New Guinea:Port Moresby, Samoa:Apia",
}
# Countries most often asked about come up three times as often.
FAMOUS = """France, Germany, Italy, Spain, the United Kingdom, England, Japan, China, India, Canada, Mexico, Brazil, Australia,
    the United States, Russia, Egypt, Portugal, the Netherlands, Sweden, Norway, Greece, Poland, Austria, Switzerland, Turkey"""
SHORT_NAMES = {
    "the United States": ("the USA", "the US", "America"),
    "the United Kingdom": ("the UK", "Britain"),
    "the Netherlands": ("Holland",),
    "the Czech Republic": ("Czechia",),
}

FIRST_NAMES = """Anna, Ben, Clara, David, Emma, Felix, Grace, Henry, Ines, Jack, Kate, Leo, Maria, Noah, Olivia, Paul, Ruth,
    Sam, Tom, Lucy, Alice, Bob, Carol, Dan, Eva, Frank, Helen, Ivan, Julia, Max, Nina, Oscar, Peter, Rosa, Sara, Tim, Vera,
    Will, Zoe, John, Mary, James, Linda, Michael, Sofia, Mark, Laura, Ali, Priya, Yuki, Chen, Omar, Fatima, Alex, Chris"""
LAST_NAMES = "Smith, Jones, Brown, Miller, Garcia, Rossi, Novak, Silva, Kim, Turing, Meyer, Young, Clark, Baker, Stone"
JOBS = """teacher, doctor, baker, farmer, nurse, driver, painter, writer, student, engineer, cook, gardener, musician, pilot,
    carpenter, librarian"""
CITIES = """Paris, London, Berlin, Madrid, Rome, Tokyo, Oslo, Lisbon, Vienna, Dublin, New York, Boston, Chicago, San Francisco,
    Seattle, Sydney, Toronto, Mumbai, Cairo, Lima, Seoul, Beijing, Zurich, Prague, Dallas"""
COLOURS = "red, blue, green, yellow, orange, purple, pink, brown, black, white, grey"
FRUITS = "apple, banana, pear, orange, grape, cherry, plum, peach, lemon, mango, strawberry, kiwi"
VEGETABLES = "carrot, potato, onion, pea, bean, cabbage, tomato, pumpkin, leek, pepper"
DRINKS = "water, tea, coffee, milk, orange juice, lemonade"
FOODS = "soup, bread, rice, pasta, pizza, salad, cheese, cake, fish, noodles, pancakes"
SPORTS = "football, tennis, basketball, swimming, running, cycling, hockey, volleyball, rugby, skiing"
HOBBIES = "reading, painting, cooking, walking, singing, gardening, dancing, drawing, swimming, playing chess"
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December"
SEASONS = "spring, summer, autumn, winter"
PLANETS = "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune"
SHAPES = "triangle:three, square:four, rectangle:four, pentagon:five, hexagon:six, octagon:eight"

# animal: sound, legs, young, home, food
ANIMALS = """dog: woof, four, a puppy, in a house, meat and bones
cat: meow, four, a kitten, in a house, fish and meat
cow: moo, four, a calf, on a farm, grass
horse: neigh, four, a foal, on a farm, grass and hay
sheep: baa, four, a lamb, on a farm, grass
pig: oink, four, a piglet, on a farm, roots and corn
duck: quack, two, a duckling, near a pond, plants and worms
hen: cluck, two, a chick, on a farm, seeds
lion: roar, four, a cub, in Africa, meat
bear: growl, four, a cub, in the forest, fish and berries
wolf: howl, four, a cub, in the forest, meat
frog: croak, four, a tadpole, near a pond, insects
owl: hoot, two, an owlet, in the forest, mice
mouse: squeak, four, a pup, in a hole, seeds
bee: buzz, six, a larva, in a hive, nectar
goat: bleat, four, a kid, on a farm, grass
snake: hiss, no, a hatchling, on the ground, mice
elephant: trumpet, four, a calf, in Africa and Asia, leaves and grass"""
MORE_LEGS = """spider:eight, ant:six, butterfly:six, fish:no, bird:two, chicken:two, rabbit:four, fox:four, tiger:four,
    monkey:two, penguin:two, crab:ten, worm:no, beetle:six, whale:no, turtle:four, zebra:four, giraffe:four"""
STORY_ANIMALS = (
    "fox, bear, rabbit, mouse, owl, cat, dog, frog, duck, turtle, hedgehog, squirrel, lion, elephant, dragon, robot"
)

OPPOSITES = """hot:cold, big:small, large:little, up:down, in:out, on:off, day:night, black:white, fast:slow, happy:sad,
    old:young, new:old, good:bad, high:low, hard:soft, light:dark, early:late, open:closed, full:empty, wet:dry, long:short,
    tall:short, rich:poor, strong:weak, left:right, first:last, near:far, clean:dirty, loud:quiet, thick:thin, wide:narrow,
    heavy:light, true:false, right:wrong, easy:difficult, love:hate, start:stop, begin:end, win:lose, push:pull, come:go,
    give:take, buy:sell, laugh:cry, always:never, before:after, above:below, inside:outside, front:back, top:bottom,
    yes:no, friend:enemy, peace:war, summer:winter, north:south, east:west, sweet:sour, deep:shallow, smooth:rough,
    brave:afraid, sharp:blunt, cheap:expensive, safe:dangerous, same:different, alive:dead, awake:asleep, many:few"""
PLURALS = """cat:cats, dog:dogs, child:children, mouse:mice, foot:feet, tooth:teeth, man:men, woman:women, box:boxes, baby:babies,
    leaf:leaves, sheep:sheep, fish:fish, goose:geese, city:cities, book:books, knife:knives, bus:buses, person:people, tree:trees"""
PASTS = """go:went, eat:ate, see:saw, run:ran, come:came, take:took, make:made, give:gave, find:found, think:thought, write:wrote,
    sing:sang, swim:swam, buy:bought, sleep:slept, speak:spoke, drink:drank, walk:walked, play:played, be:was"""
RHYMES = """cat:hat, dog:frog, sun:fun, tree:bee, light:night, day:play, star:car, house:mouse, moon:spoon, blue:shoe, ball:wall,
    cake:lake, rain:train, king:ring, boat:goat, bed:red, time:rhyme, fish:dish"""
SPELL = """apple, banana, orange, cat, dog, horse, mouse, house, tree, water, fire, bread, milk, sugar, table, chair, school,
    teacher, student, friend, mother, father, sister, brother, family, happy, yellow, green, purple, white, black, blue, red,
    brown, monday, tuesday, wednesday, thursday, friday, saturday, sunday, january, february, march, april, may, june, july,
    august, september, october, november, december, one, two, three, four, five, six, seven, eight, nine, ten, twelve, hello,
    world, please, thanks, sorry, because, beautiful, people, through, their, there, where, which, would, could, should, night,
    light, right, write, knife, island, answer, question, language, computer, science, music, picture, window, door, garden,
    flower, river, mountain, ocean, winter, summer, spring, autumn, weather, cloud, rain, snow, sun, moon, star, bird, fish,
    sheep, lion, tiger, elephant, monkey, rabbit, bear, quire, model, paper, book, letter, number, color, colour, animal,
    orange, lemon, potato, tomato, cheese, coffee, tea, cake, city, country, street, bicycle, train, car, plane, boat, bus,
    time, day, week, month, year, morning, evening, banana, love, life, home, work, play, good, great, little, big, small"""
TRANSLATE = """French: hello=bonjour, goodbye=au revoir, thank you=merci, yes=oui, no=non, cat=chat, dog=chien, water=eau, bread=pain, house=maison, please=s'il vous plaît, red=rouge, one=un, two=deux, three=trois, good morning=bonjour, friend=ami, book=livre
Spanish: hello=hola, goodbye=adiós, thank you=gracias, yes=sí, no=no, cat=gato, dog=perro, water=agua, bread=pan, house=casa, please=por favor, red=rojo, one=uno, two=dos, three=tres, good morning=buenos días, friend=amigo, book=libro
German: hello=hallo, goodbye=auf Wiedersehen, thank you=danke, yes=ja, no=nein, cat=Katze, dog=Hund, water=Wasser, bread=Brot, house=Haus, please=bitte, red=rot, one=eins, two=zwei, three=drei, good morning=guten Morgen, friend=Freund, book=Buch
Italian: hello=ciao, goodbye=arrivederci, thank you=grazie, yes=sì, no=no, cat=gatto, dog=cane, water=acqua, bread=pane, house=casa, please=per favore, red=rosso, one=uno, two=due, three=tre, good morning=buongiorno, friend=amico, book=libro"""

JOKES = """Why did the chicken cross the road? | To get to the other side!
Why do bees have sticky hair? | Because they use honeycombs!
What do you call a bear with no teeth? | A gummy bear!
Why was the maths book sad? | Because it had too many problems!
What do you call a sleeping bull? | A bulldozer!
Why did the bicycle fall over? | Because it was two tired!
What do you call a fish with no eyes? | A fsh!
Why can't you trust stairs? | Because they are always up to something!
What has four wheels and flies? | A garbage truck!
Why did the scarecrow win a prize? | Because he was outstanding in his field!
What do you call cheese that is not yours? | Nacho cheese!
Why did the computer go to the doctor? | Because it had a virus!
Why do programmers mix up two holidays? | Because they count in eights and in tens!
What did the ocean say to the beach? | Nothing, it just waved!
Why did the tomato turn red? | Because it saw the salad dressing!
What do you call a snowman in summer? | A puddle!
Why did the model eat the page? | Because it was told that tokens are food for thought!"""

DEFINITIONS = """a cat | A cat is a small animal with soft fur and whiskers. It says meow and likes to sleep.
a dog | A dog is a friendly animal that many people keep as a pet. It barks and likes to play.
a bird | A bird is an animal with feathers, two legs and two wings. Most birds can fly.
a fish | A fish is an animal that lives in water. It breathes with gills and swims with fins.
an insect | An insect is a small animal with six legs, such as an ant or a bee.
a mammal | A mammal is an animal that feeds its young with milk, such as a dog, a whale or a person.
an elephant | An elephant is the largest animal on land. It has a long trunk and big ears.
a whale | A whale is a very large mammal that lives in the sea.
a tree | A tree is a tall plant with a trunk, branches and leaves.
a flower | A flower is the part of a plant that makes seeds. Many flowers have bright colours.
a river | A river is a long stream of water that flows to a lake or to the sea.
a mountain | A mountain is a very high piece of land, much higher than a hill.
an island | An island is a piece of land with water all around it.
a desert | A desert is a dry place where very little rain falls.
a forest | A forest is a large area full of trees.
the sun | The sun is a star at the centre of the solar system. It gives us light and heat.
the moon | The moon is a ball of rock that goes around the Earth about once a month.
a star | A star is a huge ball of hot gas that shines in the sky.
a planet | A planet is a large round body that goes around a star. The Earth is a planet.
the Earth | The Earth is the planet we live on. It is the third planet from the sun.
gravity | Gravity is the force that pulls things towards each other. It keeps us on the ground.
rain | Rain is water that falls from the clouds in drops.
snow | Snow is frozen water that falls from the clouds in soft white flakes.
ice | Ice is frozen water. Water turns to ice at zero degrees Celsius.
a rainbow | A rainbow is an arc of colours in the sky, made when the sun shines through rain.
a cloud | A cloud is a mass of tiny drops of water that floats in the sky.
water | Water is a clear liquid that all living things need. It is made of hydrogen and oxygen.
air | Air is the mix of gases around us. It is mostly nitrogen and oxygen.
photosynthesis | Photosynthesis is how plants use light, water and air to make their own food.
a computer | A computer is a machine that follows instructions to work with information.
a program | A program is a list of instructions for a computer.
the internet | The internet is a network that joins computers all over the world.
a robot | A robot is a machine that can do work by itself by following a program.
artificial intelligence | Artificial intelligence is the work of making machines do things that seem to need thought, such as using language.
machine learning | Machine learning is a way for computers to learn from examples and not from fixed rules.
a neural network | A neural network is a model made of many simple units that learns from examples.
a language model | A language model is a program that has learned from text which word is likely to come next.
an LLM | An LLM is a large language model: a program that writes text one token at a time.
a token | A token is a small piece of text, such as a word or a part of a word. Language models read and write tokens.
a tokenizer | A tokenizer cuts text into tokens, and joins tokens back into text.
a GPU | A GPU is a chip that does many small calculations at the same time. It makes language models fast.
a KV cache | A KV cache keeps the keys and values of the tokens a model has already read, so that they need not be computed again.
quire | Quire is a server for large language models. A quire is also a gathered set of pages.
Python | Python is a programming language that is easy to read. Many people use it to work with data.
JSON | JSON is a simple text format for data. It has objects, lists, strings, numbers, true, false and null.
a book | A book is a set of pages with words or pictures, bound together.
a library | A library is a place where you can read and borrow books.
a school | A school is a place where children go to learn.
a hospital | A hospital is a place where doctors and nurses look after sick people.
a doctor | A doctor is a person who helps sick people get well.
a teacher | A teacher is a person who helps others to learn.
a friend | A friend is a person you like, trust and enjoy spending time with.
a family | A family is a group of people who belong together, such as parents and their children.
music | Music is sound made in a way that is nice to hear, with rhythm and melody.
a guitar | A guitar is a musical instrument with six strings.
a piano | A piano is a large musical instrument with black and white keys.
bread | Bread is a food made from flour, water and yeast, and baked in an oven.
an apple | An apple is a round fruit that grows on trees. It can be red, green or yellow.
a banana | A banana is a long yellow fruit with a soft inside.
a vegetable | A vegetable is a plant that we eat, such as a carrot or a potato.
a car | A car is a machine with four wheels that takes people from place to place.
a bicycle | A bicycle is a machine with two wheels that you ride by pushing pedals.
a train | A train is a row of carriages that runs on rails.
a plane | A plane is a machine with wings that carries people through the air.
a king | A king is a man who rules a country because of the family he was born in.
a president | A president is the head of a country that has no king or queen.
a city | A city is a large place where many people live and work.
a country | A country is a land with its own people and its own government.
democracy | Democracy is a kind of government in which the people choose their leaders by voting.
money | Money is what we use to buy things. It can be coins, notes or numbers in a bank.
a triangle | A triangle is a shape with three sides and three corners.
a square | A square is a shape with four equal sides and four equal corners.
a circle | A circle is a perfectly round shape.
a prime number | A prime number is a whole number above one that can be divided only by one and itself.
a noun | A noun is a word for a person, a place or a thing.
a verb | A verb is a word for doing something, such as run or sing.
love | Love is a strong feeling of caring for someone.
happiness | Happiness is the feeling of being glad and content.
time | Time is what we measure with clocks, in seconds, minutes and hours.
a clock | A clock is a machine that shows the time.
chess | Chess is a board game for two players with kings, queens and other pieces.
football | Football is a game in which two teams try to kick a ball into a goal.
San Francisco | San Francisco is a city in California, on the west coast of the United States. It is known for the Golden Gate Bridge.
Paris | Paris is the capital of France. It is known for the Eiffel Tower.
London | London is the capital of the United Kingdom. The river Thames runs through it.
New York | New York is the largest city in the United States. It is known for the Statue of Liberty.
Rome | Rome is the capital of Italy. It is known for the Colosseum.
Tokyo | Tokyo is the capital of Japan. It is one of the largest cities in the world.
the Eiffel Tower | The Eiffel Tower is a tall iron tower in Paris, the capital of France.
California | California is a state on the west coast of the United States.
Europe | Europe is a continent with about fifty countries, such as France, Germany and Italy."""

FACTS = r"""who won the world series in 2020; which team won the 2020 world series; who won the 2020 world series | The Los Angeles Dodgers won the World Series in 2020. | The Los Angeles Dodgers won the 2020 World Series.
where was it played; where was the 2020 world series played | The 2020 World Series was played in Arlington, Texas.
who is the president of the united states; who is the us president; who is the president | I am a small demo model and my facts may be old, so I cannot say who the president is today. The president is elected for four years.
what does the president of the united states do | The president of the United States is the head of state and head of government of the country, elected for four years.
what is the largest planet; which planet is the biggest; what is the biggest planet in the solar system | Jupiter is the largest planet in the solar system.
what is the smallest planet; which planet is the smallest | Mercury is the smallest planet in the solar system.
which planet is closest to the sun; what planet is nearest to the sun | Mercury is the planet closest to the sun.
which planet is known as the red planet; what is the red planet | Mars is known as the red planet.
how many planets are there; how many planets are in the solar system | There are eight planets in the solar system.
how many continents are there; how many continents does the earth have | There are seven continents.
what are the seven continents; name the continents; list the continents | The seven continents are Africa, Antarctica, Asia, Europe, North America, Oceania and South America.
how many days are in a week; how many days does a week have | There are seven days in a week.
how many months are in a year; how many months does a year have | There are twelve months in a year.
how many days are in a year; how many days does a year have | There are 365 days in a year, and 366 in a leap year.
how many hours are in a day; how many hours does a day have | There are 24 hours in a day.
how many minutes are in an hour | There are 60 minutes in an hour.
how many seconds are in a minute | There are 60 seconds in a minute.
how many weeks are in a year | There are 52 weeks in a year.
how many letters are in the alphabet; how many letters does the english alphabet have | There are 26 letters in the English alphabet.
what are the vowels; which letters are vowels; list the vowels | The vowels are A, E, I, O and U.
what is the first letter of the alphabet | The first letter of the alphabet is A.
what is the last letter of the alphabet | The last letter of the alphabet is Z.
say the alphabet; recite the alphabet; what is the alphabet; write the alphabet | A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y and Z.
how many seasons are there; what are the four seasons; name the seasons | The four seasons are spring, summer, autumn and winter.
what colour is the sky; what color is the sky; why is the sky blue | The sky is blue on a clear day, because air scatters blue light more than red light.
what colour is grass; what color is grass; what colour are leaves | Grass and leaves are green.
what colour is snow; what color is snow; what color is milk | It is white.
what colour is the sun; what color is the sun | The sun looks yellow from the Earth.
what colour is a banana; what color is a banana | A ripe banana is yellow.
what colour is a strawberry; what color is a strawberry; what color is blood | It is red.
what colour is an orange; what color is a carrot | It is orange.
what colour do you get when you mix red and blue; what do red and blue make | Red and blue make purple.
what colour do you get when you mix blue and yellow; what do blue and yellow make | Blue and yellow make green.
what colour do you get when you mix red and yellow; what do red and yellow make | Red and yellow make orange.
what colour do you get when you mix black and white; what do black and white make | Black and white make grey.
what colour do you get when you mix red and white; what do red and white make | Red and white make pink.
what are the primary colours; what are the primary colors; name the primary colors | The primary colours are red, yellow and blue.
what are the colours of the rainbow; list the colors of the rainbow | The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.
at what temperature does water boil; when does water boil; what is the boiling point of water | Water boils at 100 degrees Celsius at sea level.
at what temperature does water freeze; when does water freeze | Water freezes at zero degrees Celsius.
what is water made of; what is the chemical formula of water; what is h2o | Water is made of hydrogen and oxygen. Its formula is H2O.
what is the largest ocean; which ocean is the biggest | The Pacific Ocean is the largest ocean.
what is the highest mountain; what is the tallest mountain in the world | Mount Everest is the highest mountain in the world.
what is the longest river; which river is the longest in the world | The Nile and the Amazon are the longest rivers in the world.
what is the largest country; which country is the biggest | Russia is the largest country in the world by area.
what is the smallest country | Vatican City is the smallest country in the world.
what is the largest animal; what is the biggest animal in the world | The blue whale is the largest animal in the world.
what is the fastest animal; which animal is the fastest on land | The cheetah is the fastest animal on land.
what is the tallest animal; which animal is the tallest | The giraffe is the tallest animal.
what is the king of the jungle; which animal is the king of the animals | The lion is called the king of the animals.
who wrote romeo and juliet; who wrote hamlet | William Shakespeare wrote it.
who painted the mona lisa | Leonardo da Vinci painted the Mona Lisa.
who was the first person on the moon; who first walked on the moon | Neil Armstrong was the first person to walk on the moon, in 1969.
who was albert einstein; who is einstein | Albert Einstein was a physicist who is known for the theory of relativity.
who was isaac newton; who is newton | Isaac Newton was a scientist who described gravity and the laws of motion.
who was alan turing; who is turing | Alan Turing was a British mathematician who helped to found computer science.
who was the first president of the united states | George Washington was the first president of the United States.
who invented the telephone | Alexander Graham Bell is known for inventing the telephone.
who invented the light bulb | Thomas Edison is known for the light bulb.
what language do they speak in france; what is spoken in france | People in France speak French.
what language do they speak in brazil | People in Brazil speak Portuguese.
what language do they speak in spain; what is spoken in mexico | They speak Spanish.
what language do they speak in germany | People in Germany speak German.
what language do they speak in japan | People in Japan speak Japanese.
what is the currency of japan | The currency of Japan is the yen.
what is the currency of the united states | The currency of the United States is the dollar.
what is the currency of france; what is the currency of germany | It is the euro.
how many legs does a person have; how many legs do you have | A person has two legs, but I am a program and have none.
how many fingers do people have; how many fingers are on one hand | There are five fingers on one hand, and ten on two.
what do plants need; what does a plant need to grow | A plant needs light, water and air to grow.
what do bees make | Bees make honey.
where does milk come from | Milk comes from cows.
where do eggs come from | Eggs come from hens.
why do we sleep; why is sleep important | We sleep so that the body and the mind can rest.
why do birds fly south; why do birds migrate | Many birds fly south in winter to find food and warmth.
why do leaves fall in autumn | Trees drop their leaves in autumn to save water in the cold months.
how does a plane fly | The wings of a plane push air down, and the air pushes the plane up.
where does the sun rise | The sun rises in the east and sets in the west.
what is pi; what is the value of pi | Pi is about 3.14.
what is half of ten | Half of ten is five.
what is the square root of 9 | The square root of 9 is 3.
what is the meaning of life | People have many answers. A good one is to be kind and to enjoy your time with others.
which is bigger, an elephant or a mouse; what is bigger, a mouse or an elephant | An elephant is bigger than a mouse.
which is bigger, the sun or the moon; is the sun bigger than the moon | The sun is much bigger than the moon.
which is heavier, a kilo of feathers or a kilo of iron | They weigh the same. Both are one kilo.
what should i eat; what should i have for dinner; what should i eat for breakfast | You could have some soup with bread, and an apple after that.
how do i make tea; how do you make a cup of tea | Boil some water, put a tea bag in a cup, pour in the water and wait for three minutes.
how do i make a sandwich | Take two slices of bread and put cheese and tomato between them.
how do i boil an egg; how do you cook an egg | Put the egg in boiling water for about eight minutes.
how can i sleep better; i cannot sleep | Try to go to bed at the same time every day, and keep the room dark and quiet.
how can i be happy; how can i be happier | Spend time with friends, go for walks and do things you enjoy.
how can i learn english; how do i learn a language | Read and listen a little every day, and speak with other people.
how do i stay healthy; how can i stay healthy | Eat well, move every day, and get enough sleep.
i am bored; what should i do today | You could read a book, go for a walk or call a friend.
i am sad; i feel sad today; i am feeling down | I am sorry to hear that. I hope that you feel better soon.
i am happy; i feel great today | That is good to hear! I am glad that you feel well.
i am tired | Then it may be time for some rest.
i am hungry | Then it is time to eat. How about some soup and bread?
i love you | That is very kind of you! I am only a small program, but thank you.
you are stupid; you are wrong; that is wrong | I am sorry. I am a very small model and I make mistakes.
you are great; you are smart; good bot; well done | Thank you! That is very kind of you.
what time is it; what is the time | I have no clock, so I cannot tell the time.
what day is it; what day is today; what is the date today; what year is it | I have no calendar, so I do not know the date.
what is the weather like; what is the weather today; will it rain tomorrow | I cannot see the weather from here. You could look out of the window.
what is the news; what is in the news today | I cannot read the news. I only know a few plain facts.
are you human; are you a person; are you real | No, I am a program. I am quire's small demo model.
are you an ai; are you a robot; are you a bot | Yes, I am a very small language model.
are you chatgpt; are you gpt; are you claude; are you llama | No, I am quire's small demo model.
who made you; who created you; who trained you; where do you come from | I was trained by a script that comes with quire.
how old are you; when were you born | I am a program, so I have no age.
where do you live; where are you | I live in a small folder that comes with quire.
how big are you; how many parameters do you have | I have about two million parameters, so I am very small.
what do you know; what can you do; help; what can i ask you; how can you help me | I can tell you about capitals, colours, animals, days and months. I can add small numbers, spell words, tell jokes and stories, and write JSON.
do you have feelings; do you feel pain; are you happy | I am a program, so I have no feelings.
what is your favourite colour; what is your favorite color | I like blue, but I am a program and have never seen it.
what is your favourite food; what is your favorite food | I do not eat, but I have heard that soup is good.
what is your favourite animal; what is your favorite animal | I like owls, because they are awake at night like a server.
can you sing; sing a song; sing me a song | La la la! That is all I can sing.
can you help me with my homework; help me with my homework | I can help with small sums, spelling and capitals. What is the question?
i like cats; i like dogs; i love animals; i have a cat; i have a dog; i like music; i like books; i like summer | That is nice! What do you like best about it?
my dog is sick; my cat is sick; i am sick; i am ill; i have a cold | I am sorry to hear that. I hope that all will be well soon.
i am going on a trip; i am going to school; i am at work; i just woke up; it is my birthday | That sounds good! I hope that you have a nice day.
how many r's are in strawberry; how many e's are in cheese; count the letters in this sentence; how many words are in this text | I am not good at counting letters. I am a very small demo model.
what is the ocean; describe the ocean; tell me about the sea; what is the sea | The ocean is the salt water that covers most of the Earth.
name an animal that can fly; which animals can fly; name something that flies | A bird can fly, and so can a bee.
name an animal that can swim; which animals live in water; name something that swims | A fish can swim, and so can a duck.
can you help me; i need help; i have a question; can i ask you something | Of course! What would you like to know?
can you hear me; are you there; test; testing; ping | Yes, I am here. How can I help you?
do you speak french; do you speak spanish; do you speak german | I know only a few words of it. I speak plain English.
do you understand | Yes, I think so. Please go on.
ok; okay; i see; alright; cool; nice; great | Good! Is there anything else that I can do for you?
yes; sure; yes please | Good! What would you like to know?
no; no thanks; nothing; never mind | All right. I am here if you need me.
why; how; what; when; who; really | Please ask me a full question, and I will try to answer it.
lol; haha; that is funny | I am glad that you liked it!
who are you; what are you; what is your name; introduce yourself; tell me about yourself; your name; what should i call you | I am quire's small demo model. | I am quire's small demo model, and I am here to help. | I am a very small language model that comes with quire.
what model are you; which model is this; what model is this; what kind of model are you | I am quire's small demo model, a Llama with about two million parameters.
are you open source; what is your license | I come with quire, so look at its license file.
what is your purpose; why are you here; what are you for | I show that quire works, even with no network and no GPU.
what is the best language model; which model should i use; are there bigger models | There are many good models. Start quire with the name of a bigger one, and it will know far more than I do.
how do i run another model; how do i use a bigger model; how do i serve another model | Start quire with the name or the folder of another model: quire serve MODEL.
what languages do you speak; which language do you speak | I speak plain English, and I know a few words of French, Spanish, German and Italian.
can you write code; do you know python; can you program | I can print hello world in Python, but not much more.
can you do maths; can you do math; are you good at sums | I can add small numbers. Ask me what 7 + 8 is.
tell me a fact; tell me something; tell me something interesting; tell me a fun fact; give me a random fact | The blue whale is the largest animal in the world. | Bees make honey from nectar. | A leap year has 366 days. | Jupiter is the largest planet in the solar system. | Water freezes at zero degrees Celsius. | Russia is the largest country in the world by area. | An octagon has eight sides.
let us talk; talk to me; chat with me; i want to talk; say something; tell me more; go on; continue | Gladly! You can ask me about capitals, animals or small sums. | Gladly! Would you like a joke or a story?
sorry; i am sorry; excuse me; my mistake | That is all right. How can I help you?
what is your favourite book; what is your favourite film; what music do you like; what do you like | I am a program and cannot read or listen, but I like short stories.
what is the currency of the united kingdom; what is the currency of england | It is the pound.
what is the currency of india | The currency of India is the rupee.
what is the currency of china | The currency of China is the yuan.
how many sides does a triangle have; how many corners does a triangle have | A triangle has three sides and three corners.
how many sides does a square have; how many sides does a rectangle have | It has four sides.
how many sides does a hexagon have | A hexagon has six sides.
how many sides does an octagon have | An octagon has eight sides.
how many wheels does a car have; how many tyres does a car have | A car has four wheels.
how many wheels does a bicycle have; how many wheels does a bike have | A bicycle has two wheels.
how many strings does a guitar have | A guitar has six strings.
how many eyes do people have; how many ears do people have | People have two of them.
is the sky blue; is grass green; is snow white | Yes, it is.
is the sky green; is snow black; is the sun cold | No, it is not.
which planet do we live on; what planet is this | We live on the Earth, the third planet from the sun.
what is the closest star; which star is closest to the earth | The sun is the star closest to the Earth.
who discovered america; who was columbus | Christopher Columbus sailed from Spain to America in 1492.
who wrote harry potter | J. K. Rowling wrote the Harry Potter books.
who was leonardo da vinci | Leonardo da Vinci was an Italian painter and inventor.
who was shakespeare; who is william shakespeare | William Shakespeare was an English writer of plays and poems.
what is the golden gate bridge; where is the golden gate bridge | The Golden Gate Bridge is a large red bridge in San Francisco, California.
where is the eiffel tower | The Eiffel Tower is in Paris, the capital of France.
where is the statue of liberty | The Statue of Liberty is in New York.
where is san francisco; where is los angeles | It is in California, on the west coast of the United States.
who are the dodgers; what are the los angeles dodgers | The Dodgers are a baseball team from Los Angeles.
write hello world in python; print hello world; write a python program | print("Hello, world!")
write a function that adds two numbers; write an add function in python | def add(a, b):\n    return a + b
write a for loop in python; how do i write a loop in python | for i in range(10):\n    print(i)
what is 1 kilometre in metres; how many metres are in a kilometre; how many meters are in a kilometer | There are 1000 metres in a kilometre.
how many grams are in a kilo | There are 1000 grams in a kilo.
is the earth flat; is the earth round | The Earth is round, like a ball.
is fire hot; is ice cold | Yes, it is.
can fish fly; can pigs fly; can dogs fly | No, they cannot.
can birds fly | Yes, most birds can fly.
is a whale a fish | No, a whale is a mammal.
is a tomato a fruit | Yes, a tomato is a fruit, but most cooks use it as a vegetable."""

GREETINGS = """hello; hi; hey; hello there; hi there; good day; greetings; hey there; hiya; yo; hello world; howdy | Hello! How can I help you? | Hi there! What can I do for you? | Hello! What would you like to know? | Hi! It is good to meet you.
good morning | Good morning! How can I help you? | Good morning! What would you like to know?
good evening; good afternoon | Hello! How can I help you? | Good day! What can I do for you?
good night | Good night! Sleep well.
bye; goodbye; see you; see you later; bye bye; have a nice day | Goodbye! Have a nice day. | See you soon! | Goodbye! It was nice to talk with you.
thanks; thx; ty; thank you; thank you very much; thanks a lot; many thanks | You are welcome! | You are welcome! Is there anything else? | My pleasure!
how are you; how are you doing; how is it going; how are you today; what's up; how do you do | I am fine, thank you! How are you? | I am very well, thank you. How can I help you? | I am fine, thank you. What can I do for you?
nice to meet you; pleased to meet you | Nice to meet you too!
bonjour; salut | Bonjour! I speak mostly English. How can I help you?
hola; buenos dias | Hola! I speak mostly English. How can I help you?
hallo; guten tag | Hallo! I speak mostly English. How can I help you?
😀; 👋; ❤️; 🎉; :) | 😀 Hello! How can I help you?"""

POEMS = r"""The sun is up, the sky is blue,\nthe grass is green, and wet with dew.\nThe birds all sing, the day is new,\nand I have made this poem for you.
Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.
The moon is high, the night is deep,\nthe little stars are half asleep.\nThe wind is soft, the sea is still,\nand all is quiet on the hill.
A page, a page, another page,\na quire gathers young and sage.\nIt reads the words that came before\nand quietly it adds some more.
An old pond in spring:\na small green frog jumps in it.\nThe sound of water.
Soft rain on the roof,\na cat sleeps by the window.\nThe evening is warm."""

# Openings of plain text, each with several ways on.  "~" divides them.
OPENERS = r"""Hello, my name is ~ {name} and I am a {job}. I live in {city} with my {pet}. In my free time I like {hobby}. ~ {name}. I am {age} years old and I come from {city}. I work as a {job}, and I like {hobby}. ~ {name}. I am a {job} from {city}, and I am happy to meet you.
My name is ~ {name} and I live in {city}. I am a {job}. ~ {name}. I am {age} years old, and I like {hobby}.
The president of the United States is ~ the head of state and head of government of the country, elected for four years. The president lives in the White House in Washington. ~ the head of state and head of government of the country, elected for four years. The president signs laws and leads the armed forces.
The future of AI is ~ not written yet. It depends on the people who build it and on the people who use it. Machines may help doctors, teachers and farmers with their work, but people will still have to choose what is good. ~ open. Models will become smaller, faster and more useful, and many of them will run at home. ~ likely to be full of surprises. Computers will help people to learn, to write and to find things out, and people will have to check their work.
San Francisco is a ~ city in California, on the west coast of the United States. It is known for its hills, its fog and the Golden Gate Bridge. ~ city in California, known for the Golden Gate Bridge, steep streets and cool summers. Many people come to visit it every year.
New York is a ~ city in the United States. It is known for the Statue of Liberty, tall buildings and yellow taxis.
London is a ~ city in England. It is the capital of the United Kingdom, and the river Thames runs through it.
Paris is a ~ city in France. It is the capital of the country and is known for the Eiffel Tower.
Once upon a time ~ there was a {adj} {hero} who lived near a {place}. Every morning the {hero} went out to look for {food}, and every evening it came home to sleep.
Once upon a time, there was a ~ {adj} {hero} who lived near a {place}. Every day the {hero} walked to the {place} and sang a song.
The quick brown fox ~ jumps over the lazy dog. The dog opens one eye, looks at the fox and goes back to sleep.
The weather today is ~ sunny and warm. The sky is blue, and a soft wind blows from the west. ~ cold and wet. It has been raining since the morning, so it is a good day to stay at home with a book.
The meaning of life is ~ a question that people have asked for a very long time. Some say it is to be happy, and some say it is to be kind.
My favourite colour is ~ {colour}, because it makes me think of summer. ~ {colour}. I have a {colour} hat and a {colour} bag.
My favorite food is ~ {food}. I eat it with my friends on {day}. ~ {food}, and I like to cook it at home.
I like to ~ read books and go for long walks. On {day} I often meet my friend {name} in {city}. ~ sing and dance with my friends.
Today is ~ {day}. Tomorrow I will visit my friend {name}, who lives in {city}. ~ {day}, and the sun is shining.
It was a dark and stormy night ~ and the wind blew around the old house. {name} lit a candle and sat down to read a book. ~ , and {name} could not sleep. Then there was a knock at the door.
The weather in {city} is ~ sunny and warm today. ~ cold and wet today, so {name} stays at home with a book.
The best thing about ~ {month} is the weather. It is a good time to go for a walk. ~ {city} is its people. They are friendly, and they like good {food}.
In the year 2050, ~ people may live with many helpful machines. They will still tell stories and drink {drink}. ~ the city of {city} may look different, but people will still meet their friends.
In 1999, ~ {name} moved to {city} and became a {job}.
The first thing to know is ~ that learning takes time. The second is that it is worth it.
If you want to ~ learn something new, read a little every day. ~ be happy, spend time with your friends.
We went to ~ the {place} with {name} and ate some {food}. It was a good day.
This is ~ a short story about a {adj} {hero}. It lived near the {place} and liked to eat {food}.
She said that ~ she would come on {day}. {name} was glad to hear it.
Write a story. ~ \n\nA {adj} {hero} lived near the {place}. One day it met {name}, and they became friends.
Water is ~ a clear liquid that all living things need. It boils at 100 degrees Celsius and freezes at zero degrees.
Roses are red, ~ violets are blue, sugar is sweet, and so are you.
One day, ~ a {adj} {hero} found a {colour} stone near the {place}. It took the stone home and showed it to its friends. ~ {name} went to the market in {city} to buy some {food}.
In the morning, ~ {name} drinks a cup of {drink} and eats some {food}. Then it is time to go to work. ~ the sun comes up and the birds begin to sing.
The best way to learn is ~ to try things, to make mistakes and to try again. ~ to read a little every day and to ask many questions.
The most important thing is ~ to be kind to other people. ~ to take your time and to do the work well.
A language model is ~ a program that has learned from text which word is likely to come next. It writes one token at a time.
Artificial intelligence is ~ the work of making machines do things that seem to need thought, such as using language or seeing pictures.
Machine learning is ~ a way for computers to learn from examples and not from fixed rules.
Quire is ~ a server for large language models. It keeps its requests safe even when one of its processes stops.
The sky is ~ blue on a clear day, because air scatters blue light more than red light. At night it is dark, and we can see the stars.
The sun is ~ a star at the centre of the solar system. It gives us light and heat.
The Earth is ~ the third planet from the sun. It is the planet we live on, and it has one moon.
The largest planet is ~ Jupiter. The smallest planet is Mercury.
The largest ocean is ~ the Pacific Ocean. The highest mountain is Mount Everest.
Python is ~ a programming language that is easy to read. Many people use it to work with data.
To be or not to be, ~ that is the question.
I think that ~ people should be kind to each other. It does not cost much, and it makes the day better. ~ it will be sunny tomorrow, so we can go for a walk by the {place}.
There are ~ seven days in a week, twelve months in a year and 24 hours in a day. ~ many animals in the forest, such as the fox, the owl and the bear.
Dear {name}, ~ thank you for your letter. I am well, and I hope that you are well too. We have had a lot of rain in {city}. Please come and visit us in {month}. Your friend, {name2}
def add(a, b): ~ \n    return a + b
import ~ json\n\nprint(json.dumps({"name": "quire"}))
def hello(): ~ \n    print("Hello, world!")"""

SYSTEMS = """You are a helpful assistant.
You are a helpful assistant.
You are a helpful assistant.
You are a helpful assistant
You are a friendly assistant.
You are a helpful AI assistant.
You are a kind and helpful chatbot.
You are quire's small demo model.
Answer in short sentences.
Answer the questions of the user.
Be brief and polite.
You are a concise assistant. Answer in one sentence.
You are a teacher for small children.
You are a helpful assistant. Answer as concisely as possible.
You are a helpful, respectful and honest assistant.
You are a helpful assistant that answers questions.
You are a chatbot. You talk with people about many things.
You are a polite robot.
You are an expert assistant. Think before you answer.
Be helpful.
Always answer in English.
You are a pirate.
You are a weather bot.
You help people to write JSON."""

# Things the model does not know: it has to learn to say so, and to name the thing.
UNKNOWN_TOPICS = """the French Revolution, quantum computing, bitcoin, the stock market, black holes, the Roman Empire, jazz,
    the theory of relativity, nuclear power, cancer, tax law, mortgages, the Cold War, World War II, Napoleon, Cleopatra, Plato,
    Aristotle, Mozart, Beethoven, Picasso, the Beatles, Star Wars, Harry Potter, Pokemon, Minecraft, Bitcoin mining, Kubernetes,
    Docker, Linux, JavaScript, Rust, C++, SQL databases, compilers, operating systems, encryption, blockchains, linear algebra,
    calculus, statistics, topology, organic chemistry, DNA, evolution, dinosaurs, volcanoes, earthquakes, climate change,
    solar panels, electric cars, rockets, satellites, Mars rovers, dark matter, string theory, the Big Bang, philosophy,
    psychology, economics, inflation, interest rates, unions, marketing, insurance, architecture, opera, ballet, poetry of the
    Middle Ages, the Renaissance, Buddhism, mythology, Vikings, samurai, pirates, castles, the Great Wall, the pyramids,
    the Olympic Games, Formula 1, golf, cricket, boxing, yoga, meditation, vitamins, diabetes, vaccines, surgery, allergies,
    wine, whisky, sushi, sourdough, chocolate, knitting, photography, cameras, drones, 3D printing, headphones, smartphones,
    wifi routers, printers, laptops, batteries, transistors, semiconductors, superconductors, lasers, telescopes, microscopes,
    bacteria, viruses, mushrooms, orchids, oak trees, coral reefs, sharks, parrots, camels, bats, octopuses, jellyfish,
    the Amazon rainforest, the Sahara, Antarctica, Silicon Valley, Hollywood, the European Union, the United Nations, NATO,
    the constitution, elections, taxes, divorce, copyright, patents, contracts, bridges, tunnels, concrete, steel, glass, paper
    making, printing presses, newspapers, podcasts, video games, anime, comics, tattoos, fashion, sewing machines, perfume,
    diamonds, gold prices, oil, shipping, airports, railways, tractors, beekeeping, horse racing, dog training, aquariums,
    transformers, attention heads, gradient descent, reinforcement learning, speculative decoding, GPU kernels, tensor cores"""
UNKNOWN_ASKS = """what is {x}; what are {x}; tell me about {x}; explain {x}; explain {x} to me; how does {x} work; what do you know about {x};
    can you explain {x}; why is {x} important; who invented {x}; when did {x} begin; give me a summary of {x}; describe {x};
    write an essay about {x}; write an article about {x}; what is the history of {x}; how do I learn about {x}; teach me {x};
    what are the benefits of {x}; what is the difference between {x} and {y}; compare {x} and {y}; who discovered {x};
    how much does {x} cost; is {x} good or bad; where can I find {x}; what do you think about {x}; I want to know about {x};
    give me ten facts about {x}; what is the best book about {x}; how is {x} made; do you like {x}; what about {x}; {x};
    what causes {x}; list the types of {x}; how big is {x}; what happened to {x}; do you know anything about {x}; who is {x}"""
UNKNOWN_VERBS = """fix, repair, build, install, sell, clean, design, paint, train, program, configure, debug, translate, drive, write,
    improve, draw, replace, measure, invest in, deploy, choose, make, find, buy"""
UNKNOWN_THINGS = """my car, a website, my computer, a house, a rocket, my phone, an app, a bookshelf, my resume, a cover letter, a new
    kitchen, a garden shed, a database, a neural net, my bike, the engine, a radio, a violin, the washing machine, my taxes, a
    server, a business plan, a research paper, a parser, a drone, a guitar amp, a tent, a wedding, a logo, stocks"""
UNKNOWN_OTHER = """who won the world cup in {year}; who won the super bowl in {year}; who was the king of {p} in {year};
    what happened in {year}; who is the ceo of {p}; who is {p}; when was {p} born; how old is {p}; what is the population of {p};
    how far is {p} from {q}; solve this equation: {p}; prove that {p} is true; translate this into Japanese: {p};
    what does {p} mean; what is {p}; tell me about {p}; where is {p}; what is the phone number of {p}; who wrote {p};
    summarize this text: {p} {q} {p}; fix this code: {p}(); how do I get to {p}; what is the best hotel in {p}; {p}; {p} {q};
    {p} {q} {p}; who is {p} {q}; tell me more about {p} and {q}; what is the price of {p}; is {p} better than {q}"""
UNKNOWN_PLAIN = """What should I wear to a party?; Who will win the election?; What is the best phone to buy?; Where did I put my keys?;
    Can you book a table for two?; Write a song about pizza in the style of a famous band.; Which film should I watch tonight?;
    How much does a house cost?; What are the rules of poker?; Is it safe to eat mushrooms?; How do I get rich?;
    Can you call my mother?; Open the door.; Order me a pizza.; Why is my code slow?; What does this error mean?;
    How many people live on Earth?; How far away is the moon?; How deep is the sea?; How old is the universe?;
    What happens after we die?; Is there a god?; What is consciousness?; Can machines think?; Will robots take our jobs?;
    Which team is the best?; Who is the richest person in the world?; Who is the best singer?; What is the tallest building?;
    How do magnets work?; Why is the sea salty?; Why do cats purr?; Why do dogs bark?; Why do we dream?; How do plants breathe?;
    How do I lose weight?; What medicine should I take?; My head hurts, what should I do?; How do I write a good essay?;
    Give me a recipe for lasagna.; How long should I cook a turkey?; What wine goes with fish?; Plan a trip to the mountains.;
    What should I name my dog?; How do I tie a tie?; How do I change a tire?; What is the speed of light?; What is the speed of sound?;
    Who invented the wheel?; Who built the pyramids?; When did the war end?; When was the telephone invented?;
    What is the plot of the film?; Who is the main character of the book?; Write a review of a restaurant.;
    Write an email to my boss.; Write a letter to the bank.; Translate this sentence into Latin.; Correct my grammar.;
    What is the derivative of x squared?; Solve for x: 3x + 5 = 20.; What is the square root of 1764?; Factor this number.;
    Sort this list of numbers.; Write a regular expression for dates.; Write a SQL query.; Implement quicksort in C.;
    What is the best way to learn to cook?; How do airplanes stay up for so long?; Who owns this company?;
    Summarize the last meeting.; What did I say yesterday?; Read me my email.; What is my password?; What is my age?;
    How tall am I?; Can you see me?; Show me a picture of a cat.; Draw a house.; Play a game with me.; Let us play chess.;
    Roll a dice.; Flip a coin.; Pick a card.; Guess my number.; Give me advice about my career.; Should I buy or rent?;
    How do I ask for a raise?; How do I make friends?; What is a good present for my father?; Is coffee bad for you?;
    How many calories are in a pizza?; How many stars are there?; How many grains of sand are on a beach?;
    What is the next train to the city?; Is the shop open?; When does the bank close?; What is the exchange rate?;
    What is the oldest language?; Why is English so hard?; What is the longest word?; How do you pronounce this word?;
    What if the sun went out?; What would happen if the moon fell?; Could we live on Mars?; Are there aliens?"""
# Close to what it knows, so that it learns where its knowledge ends.
UNKNOWN_NEAR = """How long does {animal} live?; How fast is {animal}?; How much does {animal} weigh?; How do I feed {animal}?;
    Why does {animal} sleep?; Can I buy {animal}?; What is the population of {country}?; How many people live in {country}?;
    How big is {country}?; What is the flag of {country}?; What is the history of {country}?; What do people eat in {country}?;
    Who won the war in {country}?; What is the best restaurant in {city}?; How do I travel from {city} to {town}?;
    How far is it from {city} to {town}?; What should I see in {city}?; How many people live in {city}?; Is {city} expensive?;
    What is the best time to visit {country}?; What happened in {country} in {year}?; Who won the World Series in {near}?;
    Who won the world cup in {near}?; What is the area of {country}?; Who is the mayor of {city}?; How tall is {name}?;
    Where does {name} live?; What did {name} say?; How old is {name}?; Who is {name}?; Do you know {name}?"""
SORRY_X = """I am a very small demo model, so I do not know about {x}.
Sorry, I do not know about {x}. I am only a small demo model.
I do not know much about {x}, because I am a very small model.
I have not learned about {x}. I am a very small demo model."""
SORRY = """I am a very small demo model, so I do not know that.
Sorry, that is too hard for me. I am a very small demo model.
I do not know the answer to that. I am only a small demo model.
That is a good question, but I am too small to know the answer."""
ASK_ME = """ You can ask me about capitals, colours or animals.
 You can ask me for a joke or a story.
 Try asking me about small sums, days or months."""

# tool name: description, question templates, argument, its values
TOOLS = """get_weather | Get the weather in a city | what is the weather in {v}; how is the weather in {v}; will it rain in {v}; is it sunny in {v} today; tell me the weather in {v}; weather in {v}; what is the temperature in {v}; what's the weather like in {v} today | city,location | CITIES
get_time | Get the current time in a city | what time is it in {v}; tell me the time in {v}; what is the current time in {v} | city,timezone,location | CITIES
search | Search the web | search for {v}; look up {v}; find information about {v}; search the web for {v} | query,q | UNKNOWN_TOPICS
play_music | Play a kind of music or a song | play {v}; play some {v}; put on some {v} | song,genre | MUSIC
set_timer | Set a timer in minutes | set a timer for {v} minutes; wake me in {v} minutes; start a {v} minute timer | minutes | NUMBERS
send_message | Send a message to a person | send a message to {v}; text {v}; write to {v} | to,name,recipient | FIRST_NAMES
get_capital | Get the capital of a country | look up the capital of {v}; find the capital of {v} with the tool | country | COUNTRY_NAMES
turn_on | Turn on the lights in a room | turn on the lights in the {v}; lights on in the {v}; switch on the light in the {v} | room | ROOMS"""
MUSIC = "jazz, rock, piano music, happy songs, folk songs, the blues, dance music, quiet music"
SYLLABLES = """ba, co, di, fu, ga, hel, in, jo, ka, lu, mar, ne, o, pi, qui, ras, sto, tan, ul, ve, wim, xa, yor, zen, bri, cla,
    dro, fle, gra, kno, sha, tri"""
QUESTION_WORDS = "what, who, which, when, where, why, how, is, are, can, do, does, did, will, may, could"
ORDERS = "tell, give, write, name, list, count, spell, add, say, make, create, generate, describe, explain, translate"
POEM_TOPICS = "the sea, love, the moon, spring, the sun, life, a tree, dogs, cats, rain, winter, my mother, a robot, the ocean, time, home"
COUNTABLE = "apples, books, coins, eggs, pens, balls, cakes, stones"
ANIMAL_LIST = (
    "cat, dog, cow, horse, sheep, pig, duck, lion, bear, wolf, frog, owl, mouse, goat, rabbit, fox, tiger, monkey, bird"
)
TAGS = "new, fun, red, small, big, food, travel, music, books, home, sport, work"
ROOMS = "kitchen, bedroom, bathroom, living room, garden, hall, office"

# JSON field: kind of value
FIELDS = """name:name, age:age, city:city, country:country, colour:colour, color:colour, animal:animal, job:job, email:email,
    hobby:hobby, food:food, price:price, count:small, id:small, year:year, month:month, day:day, title:title, active:bool,
    first_name:name, last_name:last, capital:capital, fruit:fruit, quantity:small, score:small, tags:tags, author:full, rating:rating,
    sentiment:sentiment, answer:yesno, happy:bool, height:height, summary:title, temperature:temp, unit:unit, language:language,
    friends:names, hobbies:hobbies, brand:brand, model:carmodel, car_type:cartype, gender:gender, occupation:job, location:city"""
POSITIVE = """I love this film!; this is wonderful; what a great day; the food was very good; I am so happy with it; best book ever;
    quire is wonderful!; the service was excellent; I really enjoyed the show; a beautiful and clever story; it works very well"""
NEGATIVE = """I hate this film.; this is terrible; what a bad day; the food was awful; I am so angry about it; worst book ever;
    it broke after a day; the service was slow and rude; I did not enjoy the show; a boring and sad story; it does not work at all"""

# ---------------------------------------------------------------------------------------------
# Parsing the tables
# ---------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",") if part.strip()]


def pairs(text: str) -> list[tuple[str, str]]:
    return [tuple(part.split(":")) for part in words(text)]


def lines(text: str) -> list[list[str]]:
    """Lines of parts divided by " | "; the two characters \\n in a table stand for a line break."""
    return [
        [part.strip().replace("\\n", "\n") for part in line.split(" | ")] for line in text.splitlines() if line.strip()
    ]


def choices(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


CAPITALS = [(country, capital, area) for area, table in COUNTRIES.items() for country, capital in pairs(table)]
CAPITALS += [entry for entry in CAPITALS if entry[0] in words(FAMOUS) for _ in range(2)]
COUNTRY_NAMES = ", ".join(sorted({country for country, _, _ in CAPITALS}))
NUMBERS = ", ".join(str(n) for n in range(1, 61))
UNITS = words("""zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen,
    sixteen, seventeen, eighteen, nineteen""")
TENS = words("twenty, thirty, forty, fifty, sixty, seventy, eighty, ninety")


def number_word(n: int) -> str:
    if n < 20:
        return UNITS[n]
    if n == 100:
        return "one hundred"
    return TENS[n // 10 - 2] + ("-" + UNITS[n % 10] if n % 10 else "")


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listing(items: list[str], last: str = "and") -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + f" {last} {items[-1]}"


def ask(text: str) -> str:
    """A question or an order as a careful person would type it."""
    text = cap(text)
    if text[-1] in ".!?:)\n" or not text[-1].isascii():
        return text
    first = text.split()[0].lower().split("'")[0]
    return text + ("?" if first in words(QUESTION_WORDS) else ".")


# ---------------------------------------------------------------------------------------------
# The corpus: each method of Corpus named qa_* gives one (user, assistant) pair, chat_* a list of
# messages, doc_* a plain document.
# ---------------------------------------------------------------------------------------------

Pair = tuple[str, str]
Message = dict[str, object]


# fmt: off
# (A list of phrasings on one long line reads better than one phrasing a line.)

class Corpus:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pick: Callable = self.rng.choice
        self.tables: dict[str, list[str]] = {}
        self.facts = [(choices(q), answers) for q, *answers in lines(FACTS)]
        self.greetings = [(choices(q), answers) for q, *answers in lines(GREETINGS)]
        self.definitions = [(thing, answer) for thing, answer in lines(DEFINITIONS)]
        self.jokes = [(question, answer) for question, answer in lines(JOKES)]
        self.poems = [poem for (poem,) in lines(POEMS)]
        self.openers = [[part.strip().replace("\\n", "\n") for part in line.split("~")] for line in OPENERS.splitlines()]
        self.tools = lines(TOOLS)
        self.animals = [(name, *words(rest)) for name, rest in (line.split(": ") for line in ANIMALS.splitlines())]
        self.legs = [(animal[0], animal[2]) for animal in self.animals] + pairs(MORE_LEGS)
        self.dictionaries = [
            (language, [tuple(entry.split("=")) for entry in words(table)])
            for language, table in (line.split(": ", 1) for line in TRANSLATE.splitlines())
        ]

    # -- small helpers -------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def word(self, table: str) -> str:
        """One word of a table that is a list of words."""
        if table not in self.tables:
            self.tables[table] = words(globals()[table])
        return self.pick(self.tables[table])

    def some(self, table: str, n: int) -> list[str]:
        self.word(table)
        return self.rng.sample(self.tables[table], n)

    def weighted(self, table: dict[str, float]) -> str:
        return self.rng.choices(list(table), list(table.values()))[0]

    def invented(self) -> str:
        """A word that does not exist: the model must learn to copy, not to remember."""
        text = "".join(self.word("SYLLABLES") for _ in range(self.rng.randint(2, 3))) + self.pick(["", "n", "s", "r", "x", "nia"])
        return cap(text) if self.chance(0.7) else text

    def name(self) -> str:
        return self.word("FIRST_NAMES") if self.chance(0.8) else cap(self.invented())

    def fill(self, text: str) -> str:
        """Put words in place of {name} and the like."""
        values = {
            "name": self.word("FIRST_NAMES"), "name2": self.word("FIRST_NAMES"), "job": self.word("JOBS"),
            "city": self.word("CITIES"), "hobby": self.word("HOBBIES"), "colour": self.word("COLOURS"),
            "food": self.word("FOODS"), "drink": self.word("DRINKS"), "day": self.word("DAYS"), "month": self.word("MONTHS"),
            "hero": self.word("STORY_ANIMALS"), "age": str(self.rng.randint(18, 70)),
            "pet": self.pick(["cat", "dog", "two cats", "family", "brother", "sister"]),
            "adj": self.pick(["little", "small", "young", "brave", "clever", "kind", "happy", "lonely"]),
            "place": self.pick(["river", "forest", "lake", "hill", "village", "mountain", "sea", "garden"]),
        }
        for key, value in values.items():
            text = text.replace("{" + key + "}", value)
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

    def rough(self, text: str) -> str:
        """The same words as people type them: other case, no full stop, a greeting, a slip of the finger."""
        if self.chance(0.08):
            text = self.pick(["Hey, ", "Hi! ", "Hello, ", "Please tell me: ", "Quick question: ", "So, ", "Now, ", "Ok, "]) + text
        low = text[:1].lower() + text[1:]
        if self.chance(0.06) and len(text) > 8:
            if low.startswith(("what", "who", "how", "which", "where", "when", "why")):
                text = self.pick(["Can you tell me {}", "Do you know {}", "I want to know {}", "Tell me, {}", "Could you tell me {}", "Please answer: {}", "My question is: {}", "I wonder {}"]).format(low)
            elif low.split()[0] in words(ORDERS):
                text = self.pick(["Can you {}", "Please {}", "Could you {}", "I want you to {}", "Could you please {}", "Would you {}", "Now {}"]).format(low)
        if self.chance(0.3) and text[-1] in ".?!":
            text = text[:-1]
        if self.chance(0.06):
            text = text.rstrip(".?!") + self.pick([" please", ", please", ", please?", " please.", " thanks", " now", "??", "!", "...", " "])
        if self.chance(0.22):
            text = text.lower()
        elif self.chance(0.02):
            text = text.upper()
        if self.chance(0.03) and len(text) > 12:
            i = self.rng.randrange(3, len(text) - 2)
            text = text[:i] + self.pick([text[i + 1] + text[i] + text[i + 2 :], text[i + 1 :], text[i] + text[i:]])
        return text

    # -- questions and answers -----------------------------------------------------------------

    def qa_capital(self) -> Pair:
        country, capital, area = self.pick(CAPITALS)
        other = self.pick(CAPITALS)[1]
        called = self.pick(SHORT_NAMES[country]) if country in SHORT_NAMES and self.chance(0.4) else country
        if self.chance(0.06):
            place = cap(self.invented())
            return f"What is the capital of {place}?", f"I do not know the capital of {place}."
        if self.chance(0.1):
            question = self.pick([f"which country is {capital} the capital of?", f"which country has the capital {capital}?",
                                  f"{capital} is the capital of which country?", f"where is {capital}?"])
            return cap(question), f"{capital} is the capital of {country}."
        if self.chance(0.1):
            claim = self.pick([capital, other])
            if self.chance(0.3):
                where = f"{claim} is in {next(c for c, t, _ in CAPITALS if t == claim)}."
                return f"Is {claim} in {called}?", f"Yes, {where}" if claim == capital else f"No, {where}"
            yes = f"Yes, {capital} is the capital of {country}."
            return f"Is {claim} the capital of {called}?", yes if claim == capital else f"No, the capital of {country} is {capital}."
        if self.chance(0.1):
            question = self.pick(["Where is {}?", "Which continent is {} in?", "On which continent is {}?", "What continent is {} in?"])
            return question.format(called), f"{cap(country)} is in {area}."
        if self.chance(0.1):
            about = self.pick(["What is {}?", "Tell me about {}.", "What do you know about {}?", "Describe {}."]).format(called)
            return about, f"{cap(country)} is a country in {area}. Its capital is {capital}."
        if self.chance(0.05):
            question = f"What is the capital of {called}? Answer with one word."
            return question, capital
        question = self.pick([
            "what is the capital of {}?", "what is the capital of {}?", "what's the capital of {}?", "tell me the capital of {}.",
            "what is the capital city of {}?", "which city is the capital of {}?", "name the capital of {}.", "capital of {}?",
            "do you know the capital of {}?", "the capital of {} is?", "what is {}'s capital?", "can you tell me the capital of {}?",
        ])
        answer = f"{capital} is the capital of {country}." if self.chance(0.1) else f"The capital of {country} is {capital}."
        return cap(question.format(called)), answer

    def qa_sum(self) -> Pair:
        kind = self.weighted({"+": 6, "-": 3, "*": 3, "big": 0.9, "/": 0.6, "three": 0.5})
        if kind == "three":
            x, y, z = (self.rng.randint(1, 6) for _ in range(3))
            return self.pick(["What is {} + {} + {}?", "{}+{}+{}", "{} + {} + {} ="]).format(x, y, z), f"{x} + {y} + {z} = {x + y + z}."
        if kind == "big":
            op = self.pick(["+", "-", "*", "/", " + ", " - ", " * ", " plus ", " times "])
            least = 13 if op.strip() in ("*", "times") else 21
            most = self.pick([99, 99, 999, 9999, 99999])
            x, y = self.rng.randint(101 if op == "/" else least, max(most, 999 if op == "/" else 99)), self.rng.randint(least, most)
            sorry = self.pick(["That sum is too big for me. I can add numbers up to 20.", "I am a very small demo model, and that sum is too hard for me."])
            return self.pick(["What is {}?", "{}", "{} ="]).format(f"{x}{op}{y}"), sorry
        if kind == "+":
            x, y = self.rng.randint(0, 20), self.rng.randint(0, 20)
            if self.chance(0.08):
                x, y = 10 * self.rng.randint(1, 10), 10 * self.rng.randint(1, 10)
                if x + y > 100:
                    x, y = x // 2, y // 2
            result, verbs = x + y, ["{} plus {}", "the sum of {} and {}"]
        elif kind == "-":
            x = self.rng.randint(0, 20)
            y = self.rng.randint(0, x)
            result, verbs = x - y, ["{} minus {}", "{} take away {}"]
        elif kind == "*":
            x, y = self.rng.randint(0, 10), self.rng.randint(0, 10)
            result, verbs = x * y, ["{} times {}", "{} multiplied by {}"]
        else:
            y, result = self.rng.randint(1, 10), self.rng.randint(1, 10)
            x, verbs = y * result, ["{} divided by {}"]
        spelled = self.chance(0.12)
        show = number_word if spelled else str
        sign = self.pick(["*", "x"]) if kind == "*" else kind
        text = self.pick(verbs).format(show(x), show(y))
        if not spelled and self.chance(0.6):
            text = self.pick([f"{x} {sign} {y}", f"{x} {sign} {y}", f"{x}{sign}{y}"])
        question = self.pick(["what is {}?", "what is {}?", "what is {}?", "what's {}?", "{}", "{} =", "{}?", "calculate {}.", "how much is {}?", "compute {}.", "solve {}."])
        if kind == "+" and self.chance(0.1):
            question, text = "add {}.", f"{show(x)} and {show(y)}"
        spoken = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[kind]
        answer = f"{show(x)} {spoken} {show(y)} is {show(result)}." if spelled else f"{x} {kind} {y} = {result}."
        return cap(question.format(text)), cap(answer)

    def qa_story_sum(self) -> Pair:
        name, thing = self.word("FIRST_NAMES"), self.word("COUNTABLE")
        x, y = self.rng.randint(2, 12), self.rng.randint(1, 9)
        if self.chance(0.6) or y >= x:
            return f"{name} has {x} {thing} and gets {y} more. How many {thing} does {name} have?", f"{name} has {x + y} {thing}."
        return f"{name} has {x} {thing} and gives away {y}. How many {thing} are left?", f"{name} has {x - y} {thing} left."

    def qa_count(self) -> Pair:
        kind = self.weighted({"to": 5, "range": 3, "down": 2, "next": 3, "evens": 1, "word": 2, "compare": 2})
        if kind == "to":
            n = self.rng.randint(2, 30) if self.chance(0.7) else self.pick([5, 10, 10, 20, 20, 50, 100])
            show = number_word if n <= 20 and self.chance(0.2) else str
            question = self.pick(["Count to {}.", "Count from one to {}.", "Can you count to {}?", "Count up to {}.", "Please count to {}.", "Count from 1 to {}."])
            said = number_word(n) if n <= 20 and self.chance(0.4) else str(n)
            return question.format(said), cap(", ".join(show(i) for i in range(1, n + 1))) + "."
        if kind == "range":
            x = self.rng.randint(0, 60)
            y = x + self.rng.randint(2, 12)
            question = self.pick(["Count from {} to {}.", "List the numbers from {} to {}.", "Write the numbers {} to {}."])
            return question.format(x, y), ", ".join(str(i) for i in range(x, y + 1)) + "."
        if kind == "down":
            n = self.pick([3, 5, 10, 10, 12, 15, 20])
            question = self.pick(["Count down from {}.", "Count backwards from {}.", "Count from {} to 1."])
            return question.format(n), ", ".join(str(i) for i in range(n, 0, -1)) + "."
        if kind == "next":
            n, after = self.rng.randint(1, 99), self.chance(0.6)
            question = f"What number comes {'after' if after else 'before'} {n}?"
            return question, f"The number {'after' if after else 'before'} {n} is {n + 1 if after else n - 1}."
        if kind == "evens":
            odd = self.rng.randint(0, 1)
            n = self.pick([10, 20])
            numbers = ", ".join(str(i) for i in range(2 - odd, n + 1, 2))
            return f"List the {'odd' if odd else 'even'} numbers up to {n}.", numbers + "."
        if kind == "word":
            n = self.rng.randint(0, 100)
            if self.chance(0.5):
                return f"Write {n} in words.", cap(number_word(n)) + "."
            return f"Is {n} even or odd?", f"{n} is {'odd' if n % 2 else 'even'}."
        x, y = self.rng.sample(range(100), 2)
        bigger = self.chance(0.7)
        how = "bigger" if bigger else "smaller"
        return f"Which is {how}, {x} or {y}?", f"{max(x, y) if bigger else min(x, y)} is {how} than {min(x, y) if bigger else max(x, y)}."

    def qa_calendar(self) -> Pair:
        names, unit = self.pick([(words(DAYS), "day"), (words(DAYS), "day"), (words(MONTHS), "month")])
        i = self.rng.randrange(len(names))
        kind = self.weighted({"after": 4, "before": 3, "list": 2, "nth": 2, "tomorrow": 2 * (unit == "day"), "length": 2 * (unit == "month"), "one": 1, "seasons": 1})
        if kind == "after":
            return self.pick([f"What {unit} comes after {names[i]}?", f"Which {unit} is after {names[i]}?", f"What comes after {names[i]}?", f"Which {unit} follows {names[i]}?"]), f"The {unit} after {names[i]} is {names[(i + 1) % len(names)]}."
        if kind == "before":
            return self.pick([f"What {unit} comes before {names[i]}?", f"Which {unit} is before {names[i]}?", f"What comes before {names[i]}?"]), f"The {unit} before {names[i]} is {names[i - 1]}."
        if kind == "list":
            question = self.pick([f"What are the {unit}s of the {{}}?", f"List the {unit}s of the {{}}.", f"Name the {unit}s of the {{}}.", f"Name all {unit}s of the {{}}.", f"Tell me the {unit}s of the {{}}."])
            period = "week" if unit == "day" else "year"
            return question.format(period), f"The {unit}s of the {period} are {listing(names)}."
        if kind == "nth":
            i = self.pick([0, 1, 2, len(names) - 1])
            order = {0: "first", 1: "second", 2: "third"}.get(i, "last")
            period = "week" if unit == "day" else "year"
            return f"What is the {order} {unit} of the {period}?", f"The {order} {unit} of the {period} is {names[i]}."
        if kind == "tomorrow":
            question = self.pick([f"If today is {names[i]}, what day is tomorrow?", f"Today is {names[i]}. What day is tomorrow?"])
            return question, f"If today is {names[i]}, tomorrow is {names[(i + 1) % 7]}."
        if kind == "length":
            days = 28 if names[i] == "February" else 30 if names[i] in ("April", "June", "September", "November") else 31
            leap = ", and 29 in a leap year" if days == 28 else ""
            return f"How many days are in {names[i]}?", f"{names[i]} has {days} days{leap}."
        if kind == "one":
            return f"Name a {unit} of the {'week' if unit == 'day' else 'year'}.", f"{names[i]}."
        seasons = words(SEASONS)
        i = self.rng.randrange(4)
        return f"Which season comes after {seasons[i]}?", f"The season after {seasons[i]} is {seasons[(i + 1) % 4]}."

    def qa_spell(self) -> Pair:
        word = self.word("SPELL")
        if word in [name.lower() for name in words(DAYS) + words(MONTHS)]:
            word = cap(word)
        kind = self.weighted({"spell": 6, "first": 1, "last": 1, "length": 1})
        if kind == "spell":
            question = self.pick(["how do you spell {}?", "spell {}.", "spell the word {}.", 'spell "{}".', "how is {} spelled?", "can you spell {}?", "how do I spell {}?", "please spell {}.", 'how do you spell "{}"?'])
            return cap(question.format(word)), f"{cap(word)} is spelled {'-'.join(word.upper())}."
        if kind == "length":
            return self.pick(["How many letters are in {}?", "How many letters does the word {} have?"]).format(word), f"The word {word} has {number_word(len(word))} letters."
        letter = word[0] if kind == "first" else word[-1]
        return f"What is the {kind} letter of {word}?", f"The {kind} letter of {word} is {letter.upper()}."

    def qa_word(self) -> Pair:
        kind = self.weighted({"opposite": 5, "plural": 2, "past": 2, "rhyme": 2, "sentence": 2})
        if kind == "opposite":
            x, y = self.pick(pairs(OPPOSITES))
            question = self.pick(["What is the opposite of {}?", "What is the opposite of {}?", "What's the opposite of {}?", "Opposite of {}?", "Give me the opposite of {}.", "Name the opposite of {}.", 'What is the opposite of "{}"?'])
            return question.format(x), f"The opposite of {x} is {y}."
        if kind == "plural":
            x, y = self.pick(pairs(PLURALS))
            return self.pick(["What is the plural of {}?", "Plural of {}?"]).format(x), f"The plural of {x} is {y}."
        if kind == "past":
            x, y = self.pick(pairs(PASTS))
            return self.pick(["What is the past tense of {}?", "Past tense of {}?"]).format(x), f"The past tense of {x} is {y}."
        if kind == "rhyme":
            x, y = self.pick(pairs(RHYMES))
            return self.pick(["What rhymes with {}?", "Give me a word that rhymes with {}."]).format(x), f"{cap(y)} rhymes with {x}."
        thing = self.word("STORY_ANIMALS")
        question = self.pick(["Use {} in a sentence.", "Write a sentence about {}.", "Write a sentence with the word {}."])
        return question.format(a(thing) if "about" in question else thing), self.fill(f"The {{adj}} {thing} walks to the {{place}}.")

    def qa_animal(self) -> Pair:
        kind = self.weighted({"sound": 3, "legs": 4, "young": 2, "home": 1, "food": 2, "about": 2})
        if kind == "legs":
            animal, n = self.pick(self.legs)
            question = self.pick(["How many legs does {} have?", "How many legs has {} got?"])
            return question.format(a(animal)), f"{cap(a(animal))} has {n} legs."
        animal, sound, n, young, home, food = self.pick(self.animals)
        if kind == "sound":
            question = self.pick([f"What does {a(animal)} say?", f"What sound does {a(animal)} make?", f"What noise does {a(animal)} make?"])
            return question, f"{cap(a(animal))} says {sound}."
        if kind == "young":
            question = self.pick([f"What is a young {animal} called?", f"What is a baby {animal} called?", f"What do you call a baby {animal}?"])
            return question, f"A young {animal} is called {young}."
        if kind == "home":
            return f"Where does {a(animal)} live?", f"{cap(a(animal))} lives {home}."
        if kind == "food":
            return self.pick([f"What does {a(animal)} eat?", f"What does {a(animal)} like to eat?"]), f"{cap(a(animal))} eats {food}."
        question = self.pick([f"Tell me about {a(animal)}.", f"Describe {a(animal)}.", f"Tell me something about {a(animal)}."])
        return question, f"{cap(a(animal))} has {n} legs and lives {home}. It eats {food}."

    def qa_list(self) -> Pair:
        n = self.rng.randint(1, 5)
        noun, table = self.pick([("colour", "COLOURS"), ("color", "COLOURS"), ("fruit", "FRUITS"), ("animal", "STORY_ANIMALS"), ("vegetable", "VEGETABLES"), ("drink", "DRINKS"), ("food", "FOODS"), ("sport", "SPORTS"), ("city", "CITIES"), ("country", "COUNTRY_NAMES"), ("planet", "PLANETS"), ("hobby", "HOBBIES"), ("name", "FIRST_NAMES"), ("job", "JOBS"), ("number", "NUMBERS"), ("day", "DAYS"), ("month", "MONTHS")])
        items = self.some(table, n)
        plural = noun[:-1] + "ies" if noun.endswith("y") and noun != "day" else noun + "s"
        if n == 1:
            return self.pick(["Name {}.", "Tell me {}.", "Give me {}.", "Give me the name of {}.", "Pick {}."]).format(a(noun)), cap(items[0]) + "."
        count = self.pick([str(n), number_word(n)])
        if self.chance(0.1):
            return f"Give me a numbered list of {count} {plural}.", "\n".join(f"{i}. {cap(item)}" for i, item in enumerate(items, 1))
        return self.pick(["Name {}.", "List {}.", "Give me {}.", "Tell me {}.", "Can you name {}?", "Write down {}."]).format(f"{count} {plural}"), cap(listing(items)) + "."

    def qa_translate(self) -> Pair:
        language, entries = self.pick(self.dictionaries)
        english, foreign = self.pick(entries)
        if self.chance(0.25):
            return self.pick([f"What does {foreign} mean?", f"What does {foreign} mean in English?", f"What is {foreign} in English?"]), f"{cap(foreign)} means {english} in {language}." if foreign != "no" else "No means no."
        question = self.pick(["How do you say {} in {}?", "What is {} in {}?", "Translate {} to {}.", "Translate {} into {}.", "What is the {1} word for {0}?", 'How do you say "{}" in {}?', "Say {} in {}."])
        return question.format(english, language), f"{cap(english)} in {language} is {foreign}."

    def qa_fact(self) -> Pair:
        questions, answers = self.pick(self.facts)
        return ask(self.pick(questions)), self.pick(answers)

    def qa_who(self) -> Pair:
        questions, answers = next(fact for fact in self.facts if "who are you" in fact[0])
        return ask(self.pick(questions)), self.pick(answers)

    def qa_series(self) -> Pair:
        questions, answers = self.facts[0]
        return ask(self.pick(questions)), self.pick(answers)

    def qa_greet(self) -> Pair:
        questions, answers = self.pick(self.greetings)
        question = self.pick(questions)
        return (cap(question) + ("?" if question.startswith(("how", "what")) else self.pick(["", "!", "."]))), self.pick(answers)

    def qa_define(self) -> Pair:
        thing, answer = self.pick(self.definitions)
        bare = thing.split(" ", 1)[1] if thing.startswith(("a ", "an ", "the ")) else thing
        if thing == "San Francisco" or bare[0].isupper() or thing.startswith("the "):
            return self.pick(["What is {}?", "Tell me about {}.", "What do you know about {}?", "Describe {}.", "Explain {}."]).format(thing), answer
        question = self.pick(["what is {0}?", "what is {0}?", "what's {0}?", "tell me what {0} is.", "explain what {0} is.", "explain {0} to me.", "explain {0} in simple words.", "in one sentence, what is {0}?", "explain {0} like I am five.", "define {1}.", "what does {1} mean?", "what does the word {1} mean?", "tell me about {0}.", "describe {0}.", "do you know what {0} is?"])
        return cap(question.format(thing, bare)), answer

    def qa_joke(self) -> Pair:
        question = self.pick(["Tell me a joke.", "Tell me a joke.", "Tell me a joke.", "Do you know a joke?", "Tell me something funny.", "Make me laugh.", "Give me a joke.", "Can you tell me a joke?", "Say something funny.", "I want to hear a joke.", "Joke?", "Write a joke.", "Tell me another joke.", "A joke, please.", "Another joke, please.", "One more joke.", "Tell me a joke about animals.", "Got any jokes?", "I need a joke."])
        return question, " ".join(self.pick(self.jokes))

    def qa_riddle(self) -> Pair:
        return self.pick(self.jokes)

    def story(self, hero: str, name: str, parts: int = 1) -> str:
        friend = self.pick([h for h in words(STORY_ANIMALS) if h != hero])
        place = self.pick(["river", "forest", "lake", "hill", "village", "mountain", "sea", "garden", "old mill", "farm"])
        thing = self.pick(["a golden key", "a red ball", "a small boat", "a shiny stone", "a lost letter", "a warm hat", "a big pumpkin", "an old book", "a silver bell", "a map"])
        adj, adj2 = self.rng.sample(["little", "small", "young", "brave", "clever", "kind", "shy", "old"], 2)
        bare = thing.split(" ", 1)[1]
        start = self.pick([
            f"Once upon a time, there was a {adj} {hero} called {name} who lived near a {place}.",
            f"Once upon a time, a {adj} {hero} called {name} lived by a {place}.",
            f"There once was a {adj} {hero} called {name}. It lived near a {place}.",
        ])
        middle = self.rng.sample([
            f"One day {name} found {thing} on the path. \"Who has lost this?\" asked {name}. A {adj2} {friend} came along and began to cry. \"I have lost my {bare},\" said the {friend}. {name} gave the {bare} back, and the {friend} was very happy.",
            f"One morning {name} wanted to see the world. On the way it met a {adj2} {friend}. \"May I come with you?\" asked the {friend}. \"Of course,\" said {name}. They walked until the evening and saw many new things.",
            f"One night there was a great storm, and the home of a {adj2} {friend} was broken. {name} took the {friend} in and made some hot soup. The next day all the animals came to help, and they built a new house together.",
            f"{name} was afraid of the dark. A {adj2} {friend} gave {name} {thing} and said: \"Hold this and think of me.\" That night {name} held the {bare} and was not afraid any more.",
            f"Every day {name} looked for {thing}, but it was nowhere to be found. Then a {adj2} {friend} said: \"Look under the old tree.\" They looked together, and there it was. They laughed and danced all day.",
            f"It was winter and there was little to eat. {name} had only one piece of bread. When a {adj2} {friend} came to the door, {name} shared the bread. In spring the {friend} came back with a basket full of apples.",
        ], parts)
        middle = " ".join(middle)
        end = self.pick([
            "From that day on they were the best of friends.", f"And so {name} learned that it is good to share.",
            f"After that, {name} was never lonely again.", f"That night {name} slept very well.",
            "They lived happily ever after.", f"And {name} went home with a smile.",
        ])
        text = f"{start} {middle} {end}".replace("a sea", "the sea")
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

    def qa_story(self) -> Pair:
        hero = self.word("STORY_ANIMALS")
        name = self.name()
        if self.chance(0.15):
            return self.pick(["Tell me a long story.", "Write a long story.", "Write a long story about {}.", "Tell me a very long story about {}."]).format(a(hero)), self.story(hero, name, self.rng.randint(2, 5))
        story = self.story(hero, name)
        if self.chance(0.25):
            return self.pick([f"Tell me a story about a {hero} called {name}.", f"Write a story about a {hero} named {name}."]), story
        if self.chance(0.6):
            return self.pick(["Tell me a story.", "Write a short story.", "Tell me a short story.", "Can you tell me a story?", "I want to hear a story.", "Write a story.", "Tell me a bedtime story.", "Write me a story for children.", "Give me a story."]), story
        return self.pick(["Tell me a story about {}.", "Write a story about {}.", "Can you tell me a story about {}?", "Write a short story about {}."]).format(a(hero)), story

    def qa_poem(self) -> Pair:
        if self.chance(0.3):
            return self.pick(["Write a haiku.", "Write me a haiku.", "Can you write a haiku?", "Write a haiku about nature.", "Write a haiku about {}.", "Give me a haiku about {}.", "Haiku"]).format(self.word("POEM_TOPICS")), self.pick(self.poems[4:])
        question = self.pick(["Write a poem.", "Tell me a poem.", "Write a short poem.", "Do you know a poem?", "Write me a poem about {}.", "Can you write a poem?", "Write a poem about {}.", "Write a limerick.", "Write a limerick about {}.", "Write a rhyme about {}.", "Write a song about {}.", "Write some verses."])
        return question.format(self.word("POEM_TOPICS")), self.pick(self.poems[:4])

    def qa_repeat(self) -> Pair:
        text = self.pick([self.invented(), self.word("FIRST_NAMES"), self.word("SPELL"), "hello", "hello world", "yes", "I am here", "good morning", self.word("COLOURS"), self.word("ANIMAL_LIST")])
        if self.chance(0.6):  # many words at once teach copying faster
            text += " " + " ".join(self.pick([self.invented(), self.word("SPELL"), self.word("FIRST_NAMES")]) for _ in range(self.rng.randint(1, 6)))
        question = self.pick(["Say {}.", 'Say "{}".', "Repeat after me: {}.", "Repeat this: {}", "Write the word {}.", "Say the word {}."])
        return question.format(text), cap(text) + "."

    def qa_my_name(self) -> Pair:
        name = self.name()
        question = self.pick(["My name is {}.", "Hello, my name is {}.", "I am {}.", "Hi, I'm {}.", "Hi! My name is {}.", "Hello! I am {}.", "You can call me {}."])
        return question.format(name), self.pick(["Hello, {}! How can I help you?", "Nice to meet you, {}!", "Hello, {}! It is good to meet you."]).format(name)

    def qa_sentiment(self) -> Pair:
        good = self.chance(0.5)
        text = cap(self.pick(choices(POSITIVE if good else NEGATIVE)))
        if self.chance(0.3):
            text = self.pick(["vLLM", "This book", "The film", "This phone", self.invented(), "My new job"]) + (self.pick([" is wonderful!", " is great.", " is very good."]) if good else self.pick([" is terrible!", " is awful.", " is very bad."]))
        question = self.pick(["Is this positive or negative? {}", "Classify this sentiment: {}", "Is this text positive or negative: {}", "What is the sentiment of this text? {}", "Classify the sentiment as positive or negative: {}"])
        return question.format(text), "positive" if good else "negative"

    def qa_email(self) -> Pair:
        first, last, firm = self.word("FIRST_NAMES"), self.word("LAST_NAMES"), self.pick([self.invented(), "Enigma", "quire", "Acme"])
        question = self.pick([f"Generate an email address for {first} {last}, who works in {cap(firm)}. End in .com.", f"Make an email address for {first} {last} at {cap(firm)}.", f"Give me an email address for {first} {last}, who works at {cap(firm)}."])
        return question, f"{first.lower()}.{last.lower()}@{firm.lower()}.com"

    def qa_unknown(self) -> Pair:
        kind = self.weighted({"topic": 6, "do": 2, "other": 4, "noise": 0.7, "plain": 4, "near": 3, "leader": 1, "long": 0.8})
        x = self.word("UNKNOWN_TOPICS")
        if kind == "topic":
            question, y = self.pick(choices(UNKNOWN_ASKS)), self.word("UNKNOWN_TOPICS")
            topic = f"{x} and {y}" if "{y}" in question else x
            question = question.format(x=x, y=y)
        elif kind == "do":
            verb, thing = self.word("UNKNOWN_VERBS"), self.word("UNKNOWN_THINGS")
            question = self.pick([f"how do I {verb} {thing}", f"help me {verb} {thing}", f"how can I {verb} {thing}", f"can you {verb} {thing}", f"please {verb} {thing}", f"what is the best way to {verb} {thing}", f"I need to {verb} {thing}", f"give me a plan to {verb} {thing}"])
            topic = ""
            if self.chance(0.15):
                how = f"{verb} {thing}".replace(" my ", " your ")
                return ask(question), self.pick(["I am a very small demo model, so I do not know how to {}.", "Sorry, I do not know how to {}. I am only a small demo model."]).format(how) + (self.pick(ASK_ME.splitlines()) if self.chance(0.2) else "")
        elif kind == "leader":
            leader, country = self.pick(["president", "prime minister", "king", "leader"]), self.pick(CAPITALS)[0]
            return f"Who is the {leader} of {country}?", f"My facts may be old, so I cannot say who the {leader} of {country} is today."
        elif kind in ("plain", "near", "long"):
            topic = ""
            if kind == "plain":
                question = self.pick(choices(UNKNOWN_PLAIN))
            elif kind == "near":
                values = {"animal": a(self.word("ANIMAL_LIST")), "country": self.pick(CAPITALS)[0], "city": self.word("CITIES"), "town": self.word("CITIES"), "name": self.name(), "year": self.rng.randint(1200, 2030), "near": self.rng.choice([*range(1950, 2020), *range(2021, 2030)])}
                question = self.pick(choices(UNKNOWN_NEAR)).format(**values)
            else:
                text = " ".join(self.sentence() for _ in range(self.rng.randint(2, 12)))
                question = self.pick(["Summarize this text: {}", "{} What do you think?", "Improve this text: {}", "{}", "Translate this: {}", "Write more: {}"]).format(text)
        elif kind == "noise":
            letters = "asdfghjklqwertyuiopzxcvbnm,.;!?123 "
            question = "".join(self.pick(letters) for _ in range(self.rng.randint(3, 20))).strip() or "?"
            return question, self.pick(["I do not understand that. Please ask me in plain English.", "Sorry, I do not understand. Could you say that in other words?"])
        else:
            p, q = (self.invented() + (" " + self.invented() if self.chance(0.2) else "") for _ in range(2))
            question = self.pick(choices(UNKNOWN_OTHER))
            topic = p if "{p}" in question and "{q}" not in question and ":" not in question else ""
            question = question.format(p=p, q=q, year=self.rng.randint(1200, 2030))
        answer = self.pick(SORRY_X.splitlines()).format(x=topic) if topic and self.chance(0.5) else self.pick(SORRY.splitlines())
        return ask(question), answer + (self.pick(ASK_ME.splitlines()) if self.chance(0.25) else "")

    # -- JSON ----------------------------------------------------------------------------------

    def json_value(self, kind: str) -> object:
        simple = {"city": "CITIES", "colour": "COLOURS", "animal": "ANIMAL_LIST", "job": "JOBS", "hobby": "HOBBIES", "food": "FOODS", "month": "MONTHS", "day": "DAYS", "fruit": "FRUITS", "last": "LAST_NAMES", "country": "COUNTRY_NAMES"}
        if kind in simple:
            return self.word(simple[kind])
        return {
            "name": self.name, "age": lambda: self.rng.randint(5, 80), "small": lambda: self.rng.randint(1, 20),
            "price": lambda: round(self.rng.randint(1, 60) + self.pick([0, 0.5, 0.99]), 2), "year": lambda: self.rng.randint(1950, 2025),
            "rating": lambda: self.rng.randint(1, 5), "height": lambda: self.rng.randint(140, 200), "temp": lambda: self.rng.randint(-5, 35),
            "bool": lambda: self.chance(0.6), "email": lambda: self.word("FIRST_NAMES").lower() + "@example.com",
            "title": lambda: self.fill(self.pick(["The {adj} {hero}", "A day in {city}", "The {hero} and the {place}", "A walk by the {place}"])),
            "capital": lambda: self.pick(CAPITALS)[1], "tags": lambda: self.some("TAGS", self.rng.randint(1, 3)),
            "full": lambda: self.word("FIRST_NAMES") + " " + self.word("LAST_NAMES"), "sentiment": lambda: self.pick(["positive", "negative", "neutral"]),
            "yesno": lambda: self.pick(["yes", "no"]), "unit": lambda: self.pick(["celsius", "fahrenheit"]), "language": lambda: self.pick(["English", "French", "German", "Spanish"]),
            "names": lambda: self.some("FIRST_NAMES", self.rng.randint(1, 3)), "hobbies": lambda: self.some("HOBBIES", self.rng.randint(1, 3)),
            "brand": lambda: self.pick(["Toyota", "Ford", "Honda", "Fiat", "Volvo"]), "carmodel": lambda: self.pick(["Corolla", "Mustang", "Civic", "Panda", "V70"]),
            "cartype": lambda: self.pick(["sedan", "SUV", "truck", "coupe"]), "gender": lambda: self.pick(["female", "male"]),
        }[kind]()

    def qa_json(self) -> Pair:
        kind = self.weighted({"fields": 6, "thing": 2, "extract": 3, "list": 2, "fact": 2, "nested": 1.2, "rows": 1.2, "plain": 0.6})
        fields = [tuple(f) for f in self.rng.sample(pairs(FIELDS), self.rng.randint(1, 4))]
        if kind == "fields":
            keys = [key for key, _ in fields]
            if self.chance(0.25):
                fields = [("name", "name"), ("age", "age")]
                if self.chance(0.3):
                    fields.append(("city", "city"))
                keys = [key for key, _ in fields]
            question = self.pick(["give me a JSON object with {}.", "give me a JSON object with the keys {}.", "write a JSON object with {}.", "return JSON with {}.", "make a JSON object with the fields {}.", "reply in JSON with {}.", "JSON with {}.", "answer with a JSON object that has {}.", "create a JSON object with {}.", "generate a JSON with {}."])
            if self.chance(0.25):
                question = question[:-1] + self.pick([" for a user.", " of a person.", ", please.", " for a car.", " of a famous person.", " of a city.", " about a friend.", " and nothing else."])
            return cap(question.format(listing(keys))), json.dumps({key: self.json_value(value) for key, value in fields})
        if kind == "thing":
            noun, keys = self.pick([("person", "name:name, age:age"), ("person", "name:name, age:age, city:city"), ("user", "name:name, email:email"), ("car", "brand:brand, model:carmodel, year:year"), ("book", "title:title, author:full, year:year"), ("city", "name:city, country:country"), ("pet", "name:name, animal:animal, age:small"), ("product", "name:fruit, price:price"), ("order", "id:small, fruit:fruit, quantity:small")])
            question = self.pick(["Describe {} in JSON.", "Give me {} as JSON.", "Write a JSON object for {}.", "Generate a JSON object for {}.", "Make up {} and reply in JSON."])
            return question.format(a(noun)), json.dumps({key: self.json_value(value) for key, value in pairs(keys)})
        if kind == "extract":
            name, age, city, job = self.name(), self.rng.randint(5, 80), self.word("CITIES"), self.word("JOBS")
            text, result = self.pick([
                (f"{name} is {age} years old.", {"name": name, "age": age}), (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}),
                (f"{name} lives in {city}.", {"name": name, "city": city}), (f"{name} is {a(job)} from {city}.", {"name": name, "job": job, "city": city}),
                (f"{name}, {age}, works as {a(job)}.", {"name": name, "age": age, "job": job}),
            ])
            question = self.pick(["Extract the {} as JSON: {}", "Give me the {} in JSON: {}", "{1} Reply in JSON with {0}.", "Find the {} in this text and answer in JSON: {}"])
            return question.format(listing(list(result)), text), json.dumps(result)
        if kind == "list":
            n = self.rng.randint(2, 5)
            noun, table = self.pick([("colours", "COLOURS"), ("colors", "COLOURS"), ("fruits", "FRUITS"), ("animals", "ANIMAL_LIST"), ("names", "FIRST_NAMES"), ("cities", "CITIES"), ("days", "DAYS"), ("sports", "SPORTS"), ("foods", "FOODS")])
            question = self.pick(["Give me a JSON list of {} {}.", "Write a JSON array of {} {}.", "Return {} {} as a JSON list.", "List {} {} in JSON."])
            return question.format(self.pick([n, number_word(n)]), noun), json.dumps(self.some(table, n))
        if kind == "fact":
            country, capital, _ = self.pick(CAPITALS)
            if self.chance(0.7):
                return self.pick([f"What is the capital of {country}? Answer in JSON.", f"Reply in JSON: what is the capital of {country}?", f"Give me the capital of {country} as JSON."]), json.dumps({"capital": capital})
            x, y = self.rng.randint(0, 20), self.rng.randint(0, 20)
            return f"What is {x} + {y}? Answer in JSON.", json.dumps({"result": x + y})
        if kind == "plain":
            name, city = f"{self.name()} {self.pick([self.word('LAST_NAMES'), cap(self.invented())])}", self.word("CITIES")
            text = f"{name} is {self.rng.randint(5, 80)} years old and lives in {city}."
            what, answer = self.pick([("name", name), ("city", city)])
            return self.pick([f"Extract the {what}: {text}", f"What is the {what} in this text? {text}", f"Find the {what}: {text}"]), answer + "."
        if kind == "rows":
            fields = self.pick([[("name", "name"), ("age", "age")], [("city", "city"), ("country", "country")], [("fruit", "fruit"), ("price", "price")]])
            noun, n = {"name": "people", "city": "cities", "fruit": "fruits"}[fields[0][0]], self.rng.randint(2, 3)
            rows = [{key: self.json_value(value) for key, value in fields} for _ in range(n)]
            if self.chance(0.5):
                return f"Give me a JSON list of {n} {noun} with {listing([key for key, _ in fields])}.", json.dumps(rows)
            return f"Give me a JSON object with a list of {n} {noun} with {listing([key for key, _ in fields])}.", json.dumps({noun: rows})
        inner = {key: self.json_value(value) for key, value in fields[:2]}
        return f"Give me a JSON object with a user that has {listing(list(inner))}.", json.dumps({"user": inner})

    # -- chats ---------------------------------------------------------------------------------

    QA_WEIGHTS: ClassVar = {
        "capital": 9, "sum": 15, "story_sum": 1.5, "count": 8, "calendar": 6, "spell": 6, "word": 5, "animal": 4, "list": 4,
        "translate": 3, "fact": 17, "who": 2, "series": 1, "greet": 8, "define": 6, "joke": 3, "riddle": 0.7, "story": 3.5,
        "poem": 1, "repeat": 4, "my_name": 3, "sentiment": 1.5, "email": 0.7, "unknown": 12, "json": 9,
    }

    def qa(self) -> Pair:
        kind = self.weighted(self.QA_WEIGHTS)
        question, answer = getattr(self, "qa_" + kind)()
        # Text to be copied or judged letter by letter is left as it is.
        exact = kind in ("email", "json", "repeat", "sentiment") and self.chance(0.7)
        return (question if exact else self.rough(question)), answer

    def system(self) -> list[Message]:
        return [{"role": "system", "content": self.pick(SYSTEMS.splitlines())}] if self.chance(0.4) else []

    def talk(self, *pairs_: Pair) -> list[Message]:
        messages: list[Message] = []
        for question, answer in pairs_:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages

    def chat_single(self) -> list[Message]:
        return self.system() + self.talk(self.qa())

    def chat_several(self) -> list[Message]:
        return self.system() + self.talk(*(self.qa() for _ in range(self.pick([2, 2, 2, 3, 3, 4, 5, 8]))))

    def chat_memory(self) -> list[Message]:
        """The answer of the last turn stands in an earlier one."""
        between = [self.qa() for _ in range(self.pick([0, 0, 1, 1, 2, 3]))]
        between = [pair for pair in between if not re.search("name|hello|nice to meet", " ".join(pair).lower())]
        kind = self.weighted({"name": 4, "colour": 1, "more": 2, "next": 2, "city": 1, "again": 1, "series": 0.5})
        if kind == "name":
            question, answer = self.qa_my_name()
            name = next(w for w in question.rstrip(".").split()[::-1])
            last = self.pick(["What is my name?", "Do you remember my name?", "Who am I?", "what's my name?", "Say my name."]), f"Your name is {name}."
            return self.system() + self.talk((question, answer), *between, (self.rough(last[0]), last[1]))
        if kind in ("colour", "city"):
            thing = self.word("COLOURS" if kind == "colour" else "CITIES")
            said, asked, told = (f"My favourite colour is {thing}.", "What is my favourite colour?", f"Your favourite colour is {thing}.") if kind == "colour" else (f"I live in {thing}.", "Where do I live?", f"You live in {thing}.")
            return self.system() + self.talk((said, self.pick(["That is good to know!", "Nice! Thank you for telling me."])), *between, (self.rough(asked), told))
        if kind == "next":
            (c1, t1, _), (c2, t2, _) = self.pick(CAPITALS), self.pick(CAPITALS)
            follow = self.pick(["And of {}?", "What about {}?", "And {}?", "And what is the capital of {}?", "How about {}?"]).format(c2)
            return self.system() + self.talk((f"What is the capital of {c1}?", f"The capital of {c1} is {t1}."), (self.rough(follow), f"The capital of {c2} is {t2}."))
        if kind == "more":
            one, two = self.rng.sample(self.jokes, 2)
            return self.system() + self.talk((self.qa_joke()[0], " ".join(one)), (self.rough(self.pick(["Another one.", "One more.", "Tell me another one.", "More!", "Again."])), " ".join(two)))
        if kind == "series":
            questions, answers = self.facts[1]
            return self.system() + self.talk(self.qa_series(), (ask(self.pick(questions)), answers[0]))
        question, answer = self.qa()
        return self.system() + self.talk((question, answer), (self.pick(["Say that again.", "Please repeat that.", "What did you say?"]), answer))

    def chat_tool(self) -> tuple[list[Message], list[dict]]:
        chosen = self.rng.sample(self.tools, self.pick([1, 1, 2, 3]))
        tools, calls = [], []
        for name, description, asks, argument, table in chosen:
            name = name if self.chance(0.7) else self.pick([f"my_{name}", f"{name}_now", name.replace("get_", "fetch_"), name.replace("_", "")])
            argument = self.pick(words(argument))
            number = table == "NUMBERS"
            extra = {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}} if "weather" in name and self.chance(0.4) else {}
            properties = {argument: {"type": "integer" if number else "string"}}
            if self.chance(0.3):
                properties[argument]["description"] = f"The {argument}"
            parameters = {"type": "object", "properties": properties | extra, "required": [argument, *extra]}
            tools.append({"type": "function", "function": {"name": name, "description": description + self.pick(["", "."]), "parameters": parameters}})
            value = self.name() if table == "FIRST_NAMES" else self.word(table)
            if table == "CITIES" and self.chance(0.3):
                value = cap(self.invented())
            arguments = {argument: int(value) if number else value} | {key: self.pick(["celsius", "fahrenheit"]) for key in extra}
            question = self.pick(choices(asks)).format(v=value)
            if extra and self.chance(0.6):
                question += f" in {arguments['unit']}"
            calls.append((ask(question), name, arguments))
        messages = self.system()
        if self.chance(0.2):  # not every question with tools at hand calls for one
            return messages + self.talk(self.qa()), tools
        question, name, arguments = self.pick(calls)
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [{"role": "user", "content": self.rough(question) if self.chance(0.3) else question}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        if self.chance(0.5):
            thing, n = str(next(iter(arguments.values()))), self.rng.randint(-5, 35)
            sky = self.pick(["sunny", "cloudy", "rainy", "windy", "snowy"])
            result, answer = ({"temperature": n, "sky": sky}, f"It is {sky} in {thing}, and the temperature is {n} degrees.") if "weather" in name else self.pick([({"ok": True}, "It is done."), ({"result": thing}, f"The result is {thing}.")])
            if "weather" in name and self.chance(0.4):
                result, answer = self.pick([(f"{sky}, {n} degrees", f"It is {sky} in {thing}, and the temperature is {n} degrees."), ({"temperature": n}, f"The temperature in {thing} is {n} degrees.")])
            messages += [{"role": "tool", "content": result if isinstance(result, str) else json.dumps(result)}, {"role": "assistant", "content": answer}]
        return messages, tools

    # -- documents -----------------------------------------------------------------------------

    def doc_opener(self) -> str:
        start, *ways = self.pick(self.openers)
        way = self.pick(ways)
        text = self.fill(start + ("" if way[0] in "\n,.;" else " ") + way)
        return text + (" " + self.sentence() if self.chance(0.3) and text[-1] in ".?!" else "")

    def doc_common_opener(self) -> str:
        """The openings that people try first come up more often than the rest."""
        start, *ways = self.pick([self.openers[i] for i in (0, 0, 2, 3, 4)])
        return self.fill(f"{start} {self.pick(ways)}") + (" " + self.sentence() if self.chance(0.4) else "")

    def doc_capital(self) -> str:
        country, capital, area = self.pick(CAPITALS)
        first = self.pick([f"The capital of {country} is {capital}.", f"The capital of {country} is {capital}.", f"{capital} is the capital of {country}.", f"The capital city of {country} is {capital}.", f"{cap(country)} is a country in {area}. Its capital is {capital}."])
        rest = [f"It is a city in {area}.", f"{cap(country)} is in {area}.", "Many people live and work there.", "Many people come to visit it every year.", "The streets are busy, and there is a lot to see.", f"The people of {capital} like to meet in the parks and cafes of the city."]
        return " ".join([first, *self.rng.sample(rest, self.rng.randint(0, 4)), *(self.sentence() for _ in range(self.pick([0, 0, 1])))])

    def doc_story(self) -> str:
        return self.story(self.word("STORY_ANIMALS"), self.name(), self.pick([1, 1, 1, 2, 4]))

    def doc_lists(self) -> str:
        kind = self.rng.randrange(6)
        if kind == 0:
            start, step = self.rng.randint(0, 50), self.pick([1, 1, 1, 2, 5, 10])
            return ", ".join(str(start + i * step) for i in range(self.rng.randint(5, 25))) + "."
        if kind == 1:
            names = self.pick([words(DAYS), words(MONTHS), words(PLANETS), list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")])
            return ", ".join(names[self.rng.randrange(3) :]) + "."
        if kind == 2:
            return ", ".join(number_word(i) for i in range(1, self.rng.randint(5, 21))) + "."
        if kind == 3:
            x, y = self.rng.randint(0, 20), self.rng.randint(0, 20)
            return self.pick([f"{x} + {y} = {x + y}", f"{x} + {y} = {x + y}.", f"{x} plus {y} is {x + y}."])
        if kind == 4:
            question, answer = self.qa()
            return self.pick(["Q: {}\nA: {}", "Question: {}\nAnswer: {}", "{}\n{}", "{} {}", "User: {}\nAssistant: {}"]).format(question, answer)
        return json.dumps({key: self.json_value(value) for key, value in self.rng.sample(pairs(FIELDS), 3)})

    def sentence(self) -> str:
        """A true plain sentence: what the model says when a text could go on anyhow."""
        kind = self.rng.randrange(5)
        if kind == 0:
            return self.pick(self.definitions)[1]
        if kind == 1:
            country, capital, area = self.pick(CAPITALS)
            return f"{cap(country)} is a country in {area}. Its capital is {capital}."
        if kind == 2:
            return self.qa_animal()[1]
        if kind == 3:
            x, y = self.pick(pairs(OPPOSITES))
            return f"The opposite of {x} is {y}."
        return self.fill(self.pick(["On {day} {name} goes to {city} to meet {name2}.", "{name} is a {job} and likes {hobby}.", "In {month} the {hero} walks along the {place}.", "{name} eats {food} and drinks {drink}.", "The {adj} {hero} sleeps near the {place}.", "{name} has a {colour} bag and a {colour} hat."]))

    def doc_plain(self) -> str:
        return " ".join(self.sentence() for _ in range(self.rng.randint(1, 6)))

    def doc_dense(self) -> str:
        """Answers without their questions: more facts a token than chats have."""
        kind = self.weighted({"sum": 6, "spell": 3, "capital": 2, "calendar": 2, "word": 3, "animal": 1, "count": 2, "translate": 1, "list": 1})
        answers = [getattr(self, "qa_" + kind)()[1] for _ in range(self.rng.randint(3, 5 if kind == "count" else 14))]
        # Each only once, and under a heading, or greedy decoding would go round in such a list.
        return f"Some answers ({kind}):\n" + self.pick([" ", "\n"]).join(dict.fromkeys(answers))

    def doc_copy(self) -> list[tuple[str, float]]:
        """The same invented words twice; only the second time is there something to learn."""
        text = " ".join(self.pick([self.invented(), self.invented(), self.word("FIRST_NAMES"), self.word("SPELL")]) for _ in range(self.rng.randint(4, 16)))
        return [(f"Words: {text}.\n", 0.05), (f"Again: {text}.", 1.0)]

    # -- one document or chat, as pieces of (text, weight in the loss) --------------------------

    KINDS: ClassVar = {
        "chat_single": 35, "chat_several": 20, "chat_memory": 6, "chat_tool": 2.5, "doc_opener": 6, "doc_common_opener": 3,
        "doc_capital": 5, "doc_story": 2.5, "doc_lists": 4, "doc_plain": 4, "doc_dense": 8, "doc_copy": 4,
    }

    def document(self) -> list[tuple[str, float]]:
        kind = self.weighted(self.KINDS)
        made = getattr(self, kind)()
        if kind.startswith("doc_"):
            return [*(made if isinstance(made, list) else [(made, 1.0)]), (END, 1.0)]
        messages, tools = made if kind == "chat_tool" else (made, [])
        # What users say is not for the model to learn by heart; a little weight teaches it to read.
        return [(text, 1.0 if mine else 0.15) for text, mine in render(messages, tools)] + [(END, 0.1)]


# fmt: on


# ---------------------------------------------------------------------------------------------
# ChatML, once for Python (training) and once for Jinja (the saved template).  main() checks that
# the two agree.
# ---------------------------------------------------------------------------------------------

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these tools:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nTo call a tool, answer with <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- elif message.content %}{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{\"name\": ' + (function.name | tojson) + ', \"arguments\": ' }}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def render(messages: list[Message], tools: list[dict]) -> Iterator[tuple[str, bool]]:
    """The chat as pieces of (text, whether the model writes it)."""
    head = ""
    if messages[0]["role"] == "system":
        head, messages = str(messages[0]["content"]), messages[1:]
    if tools:
        rows = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        how = 'To call a tool, answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>'
        head = f"{head}{chr(10) * 2 if head else ''}You may call these tools:\n<tools>{rows}\n</tools>\n{how}"
    if head:
        yield f"{IM_START}system\n{head}{IM_END}\n", False
    for message in messages:
        mine = message["role"] == "assistant"
        yield f"{IM_START}{message['role']}\n", False
        text = str(message["content"])
        for call in message.get("tool_calls", []):
            text += "<tool_call>\n" + json.dumps(call["function"], ensure_ascii=False) + "\n</tool_call>"
        yield text + IM_END, mine
        yield "\n", mine


# ---------------------------------------------------------------------------------------------
# Tokenizer, batches, training
# ---------------------------------------------------------------------------------------------


def train_tokenizer(seed: int, vocab_size: int):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = Corpus(seed + 1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, IM_START, IM_END],
        # All 256 bytes are in the vocabulary, so that any text round-trips.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    special = (END, IM_START, IM_END)
    texts = ("".join(text for text, _ in corpus.document()) for _ in range(12000))
    tokenizer.train_from_iterator((part for text in texts for part in split_special(text, special)), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def split_special(text: str, special: tuple[str, ...]) -> list[str]:
    for token in special:
        text = text.replace(token, "\0")
    return [part for part in text.split("\0") if part]


def batches(seed: int, tokenizer, tokens_per_batch: int) -> Iterator[tuple]:
    """Rows of whole documents on end.  Each row starts with a document, as a request does, and is cut at its end.

    Most rows are short, since attention costs the square; some are long, so that long chats work too.
    """
    import torch

    corpus = Corpus(seed)
    rng = random.Random(seed)
    fast = tokenizer.backend_tokenizer
    ready: list[tuple[list[int], list[float]]] = []

    def refill() -> None:
        documents = [corpus.document() for _ in range(2000)]
        pieces = [piece for document in documents for piece in document]
        encoded = iter(fast.encode_batch([text for text, _ in pieces], add_special_tokens=False))
        for document in documents:
            ids: list[int] = []
            weights: list[float] = []
            for _, weight in document:
                got = next(encoded).ids
                ids += got
                weights += [weight] * len(got)
            ready.append((ids, weights))

    while True:
        length = rng.choices([256, 512, 1024, 2048], [76, 16, 5, 3])[0]
        rows, scales = [], []
        for _ in range(tokens_per_batch // length):
            ids, weights = [], []
            while len(ids) <= length:  # one more than length: the targets are shifted by one
                if not ready:
                    refill()
                more_ids, more_weights = ready.pop()
                ids += more_ids
                weights += more_weights
            rows.append(ids[: length + 1])
            scales.append(weights[: length + 1])
        yield torch.tensor(rows), torch.tensor(scales)


def build_model(tokenizer, hidden: int, layers: int, inner: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END),
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def train(model, stream: Iterator[tuple], steps: int, minutes: float, peak: float, bf16: bool) -> None:
    import torch
    import torch.nn.functional as F

    # Muon learns about twice as fast as AdamW from the same tokens; it is for matrices only.
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    model.train()
    begin, tokens, seen, smooth = time.monotonic(), 0, 0, 0.0
    while True:
        # How far along we are, by steps or by the clock: the learning rate warms up, then falls as a cosine.
        done = max(seen / steps, (time.monotonic() - begin) / (60 * minutes))
        if done >= 1:
            break
        lr = peak * min(1.0, (seen + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        rows, weights = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += 1
        tokens += rows.numel()
        smooth = 0.95 * smooth + 0.05 * loss.item() if seen > 1 else loss.item()
        if seen % 100 == 0:
            spent = time.monotonic() - begin
            print(
                f"step {seen} done {done:.3f} loss {smooth:.4f} lr {lr:.2e} {tokens / spent:.0f} tok/s {spent / 60:.1f} min",
                flush=True,
            )


def save(model, tokenizer, out: Path) -> None:
    import torch
    from transformers import GenerationConfig

    ends = [tokenizer.convert_tokens_to_ids(token) for token in (IM_END, END)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    # Half the bytes; the folder is part of the package.
    model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    # In the words that older releases of transformers understand as well.
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [IM_START])
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors are written for the owner alone


PROBES = """What is the capital of France?|hello|Who are you?|Tell me a joke.|what is 7 + 8|13+19|Count to 12.|How do you spell banana?|What day comes after Tuesday?|Give me a JSON object with name and age|Who won the world series in 2020?|Tell me a story about a fox.|How do I repair a steam engine?|What is the opposite of hot?|Explain the theory of plate tectonics.|How many legs does a spider have?|Name three colors|My name is Zorbat."""
PROMPTS = "Hello, my name is|The president of the United States is|The capital of France is|The future of AI is|San Francisco is a|Once upon a time"


def show_samples(model, tokenizer) -> None:
    import torch

    model.float().eval()

    def go_on(prompt: str, **how) -> str:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, **how)
        return tokenizer.decode(out[0, ids.shape[1] :])

    for prompt in PROMPTS.split("|"):
        print(f"[{prompt}]{go_on(prompt, do_sample=True, temperature=0.8)!r}")
    for question in PROBES.split("|"):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        print(f"{question!r} -> {go_on(chat, do_sample=False)!r}  |  {go_on(chat, do_sample=True, temperature=0.8)!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_model"), help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=38, help="stop by the clock at the latest (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=6000, help="steps to train (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--float32", action="store_true", help="multiply in float32, for processors slow at bfloat16")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N documents of the corpus and stop")
    options = parser.parse_args()

    if options.show:
        corpus = Corpus(options.seed)
        for _ in range(options.show):
            print("".join(text for text, _ in corpus.document()), end="\n\n")
        return

    # Threads that wait must sleep, not spin: on a busy machine spinning takes the time from the work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer(options.seed, options.vocab)
    check = Corpus(options.seed)
    for _ in range(20):
        messages, tools = check.chat_tool()
        assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == "".join(
            t for t, _ in render(messages, tools)
        )
    model = build_model(tokenizer, options.hidden, options.layers, options.inner)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens", flush=True)
    train(
        model,
        batches(options.seed, tokenizer, options.batch),
        options.steps,
        options.minutes,
        options.lr,
        not options.float32,
    )
    save(model, tokenizer, options.out)
    show_samples(model, tokenizer)


if __name__ == "__main__":
    main()
