//! Finds the known name that a misspelled one probably means.

/// The longest misspelled name that is compared with known names, in bytes.
const LONGEST_NAME: usize = 64;

/// Returns the known name that was probably meant, if one is similar.
pub fn nearest<K: AsRef<str> + Ord>(name: &str, known: impl Iterator<Item = K>) -> Option<K> {
    nearest_of(name, known, usize::MAX)
}

/// Returns the most similar known name, if one is similar, and compares at most `max_compared` names of about its length.
///
/// Comparing two names takes time proportional to the product of their lengths, so a long name is not compared at all.
pub fn nearest_of<K: AsRef<str> + Ord>(
    name: &str,
    known: impl Iterator<Item = K>,
    max_compared: usize,
) -> Option<K> {
    let farthest = |known: &K| known.as_ref().len() / 3 + 1;
    known
        .filter(|_| name.len() <= LONGEST_NAME)
        .filter(|known| known.as_ref().len().abs_diff(name.len()) <= farthest(known))
        .take(max_compared)
        .map(|known| (strsim::osa_distance(name, known.as_ref()), known))
        .filter(|(distance, known)| *distance <= farthest(known))
        .min()
        .map(|(_, nearest)| nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_similar_name_differs_in_at_most_a_third_of_its_letters_plus_one() {
        let known = ["api", "login", "search"];
        let nearest = |name| nearest(name, known.into_iter());
        assert_eq!(nearest("serach"), Some("search"));
        assert_eq!(nearest("logn"), Some("login"));
        assert_eq!(nearest("seaxxch"), Some("search"));
        assert_eq!(nearest("sxxxxch"), None);
        assert_eq!(nearest(&"search".repeat(11)), None);
    }

    #[test]
    fn at_most_the_given_number_of_names_is_compared() {
        let known = ["xxxxxx", "search"];
        assert_eq!(nearest_of("serach", known.into_iter(), 1), None);
        assert_eq!(nearest_of("serach", known.into_iter(), 2), Some("search"));
    }
}
